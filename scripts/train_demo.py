"""Train the demo model that ships with Baton: a Llama of a million parameters that tells stories.

    python -m scripts.train_demo --out wire/demo --seed 0

The model exists so that the whole system can be tried, and tested, with real text on any machine:
it writes grammatical sentences, and it answers questions about its prompt that nothing but the
prompt can answer (`scripts.stories`), so a lost or mixed-up KV block shows as a wrong word.

How it learns to look things up within half an hour on two cores:

- every name, thing and place is one token, so a lookup is one attention;
- the looked-up words weigh far more in the loss than the rest of the text;
- training begins with bare lists of facts, and every text is asked about several times;
- the bindings are random, and far too many to be memorised.

The directory written is a Hugging Face checkpoint (`LlamaForCausalLM`, bfloat16); the script ends
by loading it back and comparing logits.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from scripts import stories
from scripts.stories import RecallCase, Story, Turn

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_TEXT,
    "pad_token": END_OF_TEXT,
    "model_max_length": 2048,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
# An upper bound: the training text runs out of pairs to merge before.
MAX_VOCABULARY = 1536

# What a token weighs in the loss. A prompt is worth little, and what has to be looked up in it is
# worth a lot: with equal weights recall stays at chance for as long as we train.
PROMPT_WEIGHT = 0.3
TEXT_WEIGHT = 1.0
RECALL_WEIGHT = 20.0
# What follows is decided by the person who asks, so the model must not learn to expect it.
GLUE_WEIGHT = 0.0

# How many documents are drawn at once, to be sorted by length into batches.
POOL_DOCUMENTS = 256
BATCH_TOKENS = 2048
# The part of the run in which bare lists of facts give way to stories.
NOTES_UNTIL = 0.35

# Adam takes the embedding and the norms, Muon every other matrix; both follow one schedule.
ADAM_RATE = 3e-3
MUON_RATE = 8e-3
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 100
FINAL_RATE = 0.02

# Steps between two looks at the recall, each of which also saves the model.
REPORT_STEPS = 500
# The longest right answer is a dozen tokens.
MAX_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Piece:
    """A stretch of a training document and what its tokens weigh."""

    text: str
    weight: float


@dataclass(frozen=True)
class Batch:
    """Documents padded to one length; padding weighs nothing."""

    tokens: Tensor  # [documents, length] int64
    weights: Tensor  # [documents, length] float32


def train_tokenizer(rng: Random, num_stories: int = 6000) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE in which every word of the stories is one token."""

    def texts() -> Iterator[str]:
        for _ in range(num_stories):
            story = stories.make_story(rng)
            for turn in stories.chat_recall(rng, [story], 6) + stories.chat_telling(rng, story):
                yield turn.content
            for turn in stories.chat_small_talk(rng):
                yield turn.content
            yield stories.completion_question(story.questions[0])

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **TOKENIZER_CONFIG)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    return LlamaForCausalLM(config)


def draw_document(rng: Random, progress: float) -> list[Piece]:
    """One training document; `progress` through the run decides how hard."""
    if rng.random() < max(0.1, 0.9 * (1 - progress / NOTES_UNTIL)):
        notes = [stories.make_notes(rng, rng.randint(2, 5))]
        return rng.choice((chat_recall_pieces, completion_recall_pieces))(rng, notes)
    kind = rng.choices(("tell", "chat", "completion", "plain", "talk"), (20, 35, 25, 18, 2))[0]
    if kind == "talk":
        return chat_pieces(stories.chat_small_talk(rng))
    if kind == "tell":
        return chat_pieces(stories.chat_telling(rng, stories.make_story(rng), rng.choice((0, 3))))
    if kind == "plain":
        return [Piece(stories.make_story(rng).text + END_OF_TEXT, TEXT_WEIGHT)]
    told = stories.make_stories(rng, rng.choices((1, 2, 3, 4), (60, 20, 15, 5))[0])
    return (chat_recall_pieces if kind == "chat" else completion_recall_pieces)(rng, told)


def chat_recall_pieces(rng: Random, told: Sequence[Story]) -> list[Piece]:
    return chat_pieces(stories.chat_recall(rng, told, rng.randint(6, 10)))


def chat_pieces(turns: Sequence[Turn]) -> list[Piece]:
    """Render a chat as the template does, weighing what the assistant says."""
    pieces: list[Piece] = []
    for turn in turns:
        pieces.append(Piece(f"<|{turn.role}|>", GLUE_WEIGHT))
        if turn.role == "assistant":
            pieces += answer_pieces(turn.content, turn.recalled)
            pieces.append(Piece(END_OF_TURN, TEXT_WEIGHT))
        else:
            pieces.append(Piece(turn.content, PROMPT_WEIGHT))
            pieces.append(Piece(END_OF_TURN, GLUE_WEIGHT))
    return pieces


def completion_recall_pieces(rng: Random, told: Sequence[Story]) -> list[Piece]:
    pieces: list[Piece] = []
    for story in told:
        pieces += [Piece(story.text, PROMPT_WEIGHT), Piece("\n\n", GLUE_WEIGHT)]
    pieces.pop()
    for question in stories.pick_questions(rng, told, rng.randint(6, 10)):
        pieces.append(Piece(stories.completion_question(question), GLUE_WEIGHT))
        pieces += answer_pieces(" " + question.answer, question.recalled)
    return [*pieces, Piece(END_OF_TEXT, TEXT_WEIGHT)]


def answer_pieces(answer: str, recalled: str) -> list[Piece]:
    before, recalled, after = answer.partition(recalled) if recalled else (answer, "", "")
    return [Piece(before, TEXT_WEIGHT), Piece(recalled, RECALL_WEIGHT), Piece(after, TEXT_WEIGHT)]


def draw_batches(rng: Random, tokenizer: PreTrainedTokenizerFast, progress: float) -> list[Batch]:
    """Draw a pool of documents and pack those of similar length together."""
    pool = [draw_document(rng, progress) for _ in range(POOL_DOCUMENTS)]
    encodings = tokenizer.backend_tokenizer.encode_batch(
        ["".join(piece.text for piece in pieces) for pieces in pool]
    )
    documents: list[tuple[list[int], list[float]]] = []
    for pieces, encoding in zip(pool, encodings, strict=True):
        by_character = [piece.weight for piece in pieces for _ in piece.text]
        # Pieces meet between words, so the last character of a token speaks for all of it.
        weights = [by_character[end - 1] for _, end in encoding.offsets]
        documents.append((encoding.ids, weights))
    documents.sort(key=lambda document: len(document[0]))
    batches: list[Batch] = []
    rows: list[tuple[list[int], list[float]]] = []
    for document in documents:
        if rows and (len(rows) + 1) * len(document[0]) > BATCH_TOKENS:
            batches.append(pad(rows))
            rows = []
        rows.append(document)
    batches.append(pad(rows))
    rng.shuffle(batches)
    return batches


def pad(rows: Sequence[tuple[list[int], list[float]]]) -> Batch:
    length = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    weights = torch.zeros(len(rows), length)
    for row, (ids, row_weights) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        weights[row, : len(ids)] = torch.tensor(row_weights)
    return Batch(tokens, weights)


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The mean negative log-likelihood of the tokens, each counted by its weight."""
    # Padding comes last and attention is causal, so no mask is needed.
    hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[:, :-1]
    weights = batch.weights[:, 1:]
    counted = weights > 0
    logits = model.lm_head(hidden[counted])
    losses = functional.cross_entropy(logits, batch.tokens[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


class Muon:
    """Momentum whose update is made orthogonal: lookups appear several times sooner than with Adam.

    `torch.optim.Muon` orthogonalises in bfloat16, which a CPU without such units does fifty times
    slower than float32. This one also treats all matrices of one shape together.
    """

    def __init__(self, matrices: Sequence[Tensor], momentum: float = 0.95) -> None:
        by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self._groups = [
            (group, torch.zeros(len(group), *shape)) for shape, group in by_shape.items()
        ]
        self._momentum = momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrices, average in self._groups:
            gradients = torch.stack([_gradient(matrix) for matrix in matrices])
            average.lerp_(gradients, 1 - self._momentum)
            updates = orthogonalise(gradients.lerp_(average, self._momentum))
            # 0.2 √n gives an entry the size it would have in an update of Adam's.
            scale = rate * 0.2 * math.sqrt(max(updates.shape[1:]))
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.mul_(1 - rate * WEIGHT_DECAY).sub_(update, alpha=scale)
                matrix.grad = None


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring all singular values near one, by five steps of a quintic Newton-Schulz iteration."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def train(out: Path, seed: int, steps: int, minutes: float) -> None:
    """Train for `steps`, or fewer if they would not fit into `minutes`, and write the model."""
    started = time.monotonic()
    rng = Random(seed)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(rng)
    model = make_model(tokenizer)
    adam = torch.optim.AdamW(
        [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    muon = Muon([p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name])
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)

    step, progress, mean_loss = 0, 0.0, 0.0
    batches: list[Batch] = []
    while progress < 1:
        batches = batches or draw_batches(rng, tokenizer, progress)
        loss = weighted_loss(model, batches.pop())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = rate_at(step, progress)
        for group in adam.param_groups:
            group["lr"] = rate * ADAM_RATE
        adam.step()
        adam.zero_grad()
        muon.step(rate * MUON_RATE)

        step += 1
        elapsed = (time.monotonic() - started) / 60
        progress = max(step / steps, elapsed / minutes)
        mean_loss += (loss.item() - mean_loss) * max(0.02, 1 / step)
        if step % REPORT_STEPS == 0 and progress < 1:
            save(model, tokenizer, out)
            recall = recall_accuracy(model, tokenizer, num_cases=50)
            print(f"step {step}, {elapsed:.1f} min, loss {mean_loss:.3f}, {recall}", flush=True)

    save(model, tokenizer, out)
    saved = load(out)
    check_logits(model, saved, tokenizer)
    summary = {
        "seed": seed,
        "steps": step,
        "parameters": model.num_parameters(),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "held_out_recall": recall_accuracy(saved, tokenizer, num_cases=250),
    }
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def rate_at(step: int, progress: float) -> float:
    """A short warm-up, then a cosine down to almost nothing."""
    warmth = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmth * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint in bfloat16, leaving `model` as it is."""
    rounded = make_model(tokenizer)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    end_tokens = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN])
    rounded.generation_config = GenerationConfig(
        eos_token_id=end_tokens, pad_token_id=end_tokens[0]
    )
    rounded.save_pretrained(out)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")


def load(out: Path) -> LlamaForCausalLM:
    """Load the rounded weights, to compute with in float32."""
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


@torch.inference_mode()
def check_logits(
    trained: LlamaForCausalLM, saved: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Fail unless what was saved is what was trained, up to rounding."""
    rounded = make_model(tokenizer)
    rounded.load_state_dict({k: v.bfloat16().float() for k, v in trained.state_dict().items()})
    tokens = tokenizer(stories.make_story(Random(0)).text, return_tensors="pt").input_ids
    torch.testing.assert_close(saved(tokens).logits, rounded(tokens).logits)


def recall_accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_cases: int
) -> dict[str, float]:
    """The share of held-out questions answered right, by form and number of stories."""
    accuracy: dict[str, float] = {}
    for num_stories in (1, 2):
        cases = list(stories.recall_cases(num_cases, seed=1, num_stories=num_stories))
        chats = [chat_prompt(tokenizer, case) for case in cases]
        for form, prompts in (("chat", chats), ("completion", [case.prompt for case in cases])):
            outputs = generate(model, tokenizer, prompts)
            right = sum(map(RecallCase.is_answered_by, cases, outputs))
            accuracy[f"{form}, {num_stories} stories"] = right / num_cases
    return accuracy


def chat_prompt(tokenizer: PreTrainedTokenizerFast, case: RecallCase) -> str:
    messages = [{"role": turn.role, "content": turn.content} for turn in case.messages]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(prompt)


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> list[str]:
    """Continue every prompt greedily to an end token."""
    outputs: list[str] = []
    for start in range(0, len(prompts), 100):
        inputs = tokenizer(
            list(prompts[start : start + 100]),
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_token_type_ids=False,
        )
        tokens = model.generate(
            **inputs,
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN]),
            pad_token_id=tokenizer.pad_token_id,
        )
        answers = tokens[:, inputs["input_ids"].shape[1] :]
        outputs += tokenizer.batch_decode(answers, skip_special_tokens=True)
    return outputs


def _gradient(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("wire/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=25.0, help="end within this time")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.out, args.seed, args.steps, args.minutes)


if __name__ == "__main__":
    main()
