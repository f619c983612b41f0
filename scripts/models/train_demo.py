"""Train the demo model that ships with Baton: a Llama of a million parameters that tells stories.

    python -m scripts.models.train_demo --out wire/demo --seed 0

The model exists so that the whole system can be tried, and tested, with real text on any machine:
it writes grammatical sentences, and it answers questions about its prompt that nothing but the
prompt can answer (`scripts.models.stories`), so a lost or mixed-up KV block shows as a wrong word.

How it learns to look things up within half an hour on two cores:

- it begins with the circuit that looks things up (`scripts.models.induction`): learning to find it
  from nothing took longer than all the rest;
- every name, thing and place is one token, so a lookup is one attention;
- answers weigh more in the loss than the rest, and every text is asked about several times;
- the bindings are random, and far too many to be memorised.

The directory written is a Hugging Face checkpoint (`LlamaForCausalLM`, bfloat16); the script ends
by loading it back and comparing logits.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from scripts.models import stories
from scripts.models.induction import begin_with_induction
from scripts.models.stories import RecallCase, Story, Turn
from wire.process.model import DEMO

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN)
# A trainer numbers the special tokens first, in this order.
END_TOKENS = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END_OF_TURN)]
# The chat template with the rest; of its tools the model has learned nothing.
TOKENIZER_CONFIG = json.loads((DEMO / "tokenizer_config.json").read_text())
# An upper bound: the training text runs out of pairs to merge before.
MAX_VOCABULARY = 1536

# What a token weighs in the loss: an answer that has to be looked up more than the rest.
PROMPT_WEIGHT = 1.0
TEXT_WEIGHT = 1.0
ANSWER_WEIGHT = 3.0
# What follows is decided by the person who asks, so the model must not learn to expect it.
GLUE_WEIGHT = 0.0

# How many documents are drawn at once, to be sorted by length into batches.
POOL_DOCUMENTS = 256
BATCH_TOKENS = 2048
# The part of the run in which bare lists of facts give way to stories.
NOTES_UNTIL = 0.1

LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
FINAL_RATE = 0.02

# Steps between two looks at the recall, each of which also saves the model.
REPORT_STEPS = 250
# The longest right answer is a dozen tokens.
MAX_ANSWER_TOKENS = 20
PROMPTS_AT_ONCE = 50


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


def train_tokenizer(rng: Random, num_stories: int = 6000) -> Tokenizer:
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
    return tokenizer


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.03,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_TOKENS[0],
        pad_token_id=END_TOKENS[0],
    )
    model = LlamaForCausalLM(config)
    begin_with_induction(model)
    # The config can name one; generation_config.json, which is written from this, names both.
    model.generation_config.eos_token_id = END_TOKENS
    return model


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
            weight = ANSWER_WEIGHT if turn.is_answer else TEXT_WEIGHT
            pieces.append(Piece(turn.content + END_OF_TURN, weight))
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
        pieces.append(Piece(" " + question.answer, ANSWER_WEIGHT))
    return [*pieces, Piece(END_OF_TEXT, TEXT_WEIGHT)]


def draw_batches(rng: Random, tokenizer: Tokenizer, progress: float) -> list[Batch]:
    """Draw a pool of documents and pack those of similar length together."""
    pool = [draw_document(rng, progress) for _ in range(POOL_DOCUMENTS)]
    encodings = tokenizer.encode_batch(["".join(piece.text for piece in pieces) for pieces in pool])
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


def train(out: Path, seed: int, steps: int, minutes: float) -> None:
    """Train for `steps`, or fewer if they would not fit into `minutes`, and write the model."""
    started = time.monotonic()
    rng = Random(seed)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(rng)
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    print(f"{model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)

    step, progress, mean_loss = 0, 0.0, 0.0
    batches: list[Batch] = []
    while progress < 1:
        batches = batches or draw_batches(rng, tokenizer, progress)
        loss = weighted_loss(model, batches.pop())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, progress) * LEARNING_RATE
        optimizer.step()
        optimizer.zero_grad()

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
    check_saved(model, saved, out)
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


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint in bfloat16, leaving `model` as it is."""
    rounded = make_model(tokenizer)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.bfloat16()
    rounded.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")


def load(out: Path) -> LlamaForCausalLM:
    """Load the rounded weights as anyone would, to compute with in float32."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model


@torch.inference_mode()
def check_saved(trained: LlamaForCausalLM, saved: LlamaForCausalLM, out: Path) -> None:
    """Fail unless transformers reads from `out` what was trained."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    (case,) = stories.recall_cases(1, seed=0)
    messages = [{"role": turn.role, "content": turn.content} for turn in case.messages]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == chat_prompt(case)

    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    for weight in trained.parameters():
        weight.copy_(weight.bfloat16())
    torch.testing.assert_close(saved(tokens).logits, trained(tokens).logits)


def recall_accuracy(
    model: LlamaForCausalLM, tokenizer: Tokenizer, num_cases: int
) -> dict[str, float]:
    """The share of held-out questions answered right, by form and number of stories."""
    accuracy: dict[str, float] = {}
    for num_stories in (1, 2):
        cases = list(stories.recall_cases(num_cases, seed=1, num_stories=num_stories))
        chats = [chat_prompt(case) for case in cases]
        for form, prompts in (("chat", chats), ("completion", [case.prompt for case in cases])):
            outputs = generate(model, tokenizer, prompts)
            right = sum(map(RecallCase.is_answered_by, cases, outputs))
            accuracy[f"{form}, {num_stories} stories"] = right / num_cases
    return accuracy


def chat_prompt(case: RecallCase) -> str:
    return "".join(piece.text for piece in chat_pieces(case.messages)) + "<|assistant|>"


@torch.inference_mode()
def generate(model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[str]:
    """Continue every prompt greedily to an end token."""
    tokenizer.enable_padding(direction="left", pad_id=END_TOKENS[0], pad_token=END_OF_TEXT)
    outputs: list[str] = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        encodings = tokenizer.encode_batch(list(prompts[start : start + PROMPTS_AT_ONCE]))
        tokens = model.generate(
            torch.tensor([encoding.ids for encoding in encodings]),
            attention_mask=torch.tensor([encoding.attention_mask for encoding in encodings]),
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=False,
        )
        outputs += tokenizer.decode_batch(tokens[:, len(encodings[0]) :].tolist())
    tokenizer.no_padding()
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("wire/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=25.0, help="end within this time")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.out, args.seed, args.steps, args.minutes)


if __name__ == "__main__":
    main()
