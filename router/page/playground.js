// A conversation with the model: each token with its probability, and the timeline of the answer.

const NUM_LIKELY = 5;
const MAX_TOKENS = 4096; // of an answer, with their probabilities
let messages = [];
let answer = null; // the latest: {id, tokens, times, startedAt, endedAt, content, report}
let selected = -1;
let stopAnswer = null;

const hasChat = () => cluster.about.has_chat;

function requestOf(prompt) {
  const common = { stream: true, max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value) };
  if (hasChat()) return ["v1/chat/completions", { messages, logprobs: true, top_logprobs: NUM_LIKELY, ...common }];
  const isText = cluster.about.has_text;
  const ids = isText ? prompt : prompt.split(/[\s,]+/).filter(Boolean).map(Number);
  const scores = isText ? { logprobs: NUM_LIKELY } : {};
  return ["v1/completions", { prompt: ids, return_token_ids: !isText, ...scores, ...common }];
}

// The new text of an event, and its tokens as {text, logprob, likely: [[text, logprob], …]}.
function newTokens(choice) {
  const scores = choice.logprobs;
  const text = choice.delta ? (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "") : choice.text;
  if (scores?.content) {
    const likely = (each) => each.top_logprobs.map((it) => [it.token, it.logprob]);
    return [text, scores.content.map((it) => ({ text: it.token, logprob: it.logprob, likely: likely(it) }))];
  }
  if (scores?.tokens) {
    const one = (token, i) => ({ text: token, logprob: scores.token_logprobs[i], likely: Object.entries(scores.top_logprobs?.[i] ?? {}) });
    return [text, scores.tokens.map(one)];
  }
  const ids = choice.token_ids ?? [];
  return text ? [text, []] : [ids.map((id) => `${id} `).join(""), []];
}

function sureness(logprob) {
  const p = Math.exp(logprob);
  return p > 0.9 ? "sure" : p > 0.5 ? "" : p > 0.1 ? "unsure" : "rare";
}

function append(paragraph, [text, tokens]) {
  answer.times.push(performance.now());
  // The last token has no text if it ends the answer, and a part of a letter if that has several.
  const found = [];
  for (const token of tokens) {
    if (!text.startsWith(token.text)) break;
    found.push(token);
    text = text.slice(token.text.length);
  }
  if (text) found.push({ ...tokens.at(-1), text });
  for (const token of found) {
    const node = element("i", { textContent: token.text, className: token.logprob == null ? "sure" : sureness(token.logprob) });
    if (token.logprob != null && answer.tokens.length < MAX_TOKENS) {
      node.dataset.index = answer.tokens.length;
      answer.tokens.push({ ...token, node });
    }
    paragraph.append(node);
  }
}

function select(index) {
  answer?.tokens[selected]?.node.classList.remove("at");
  const token = answer?.tokens[index];
  selected = token ? index : -1;
  if (!token) return;
  token.node.classList.add("at");
  write($("token-title"), `Token ${index + 1}: ${JSON.stringify(token.text)}`);
  const items = token.likely.map(([text, logprob]) => {
    const share = Math.exp(logprob);
    const item = element("li", { className: text === token.text ? "chosen" : "" });
    item.style.backgroundSize = `${100 * share}% 100%`;
    item.append(element("span", { textContent: text.replaceAll("\n", "↵") || "∅" }), element("b", { textContent: `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %` }));
    return item;
  });
  $("likely").replaceChildren(...items);
}

// The phases that the router measured, and a tick for each event that has arrived here.
function drawAnswer() {
  if (!answer) return;
  if (stopAnswer) {
    select(answer.tokens.length - 1);
    $("talk").scrollTop = $("talk").scrollHeight;
  }
  const { report, times, startedAt } = answer;
  const row = [...cluster.rows.values()].findLast((each) => each.id === answer.id);
  const elapsed = ((answer.endedAt ?? performance.now()) - startedAt) / 1000;
  const step = Math.ceil(times.length / 200);
  const ticks = times.filter((_, i) => i % step === 0).map((time) => (time - startedAt) / 1000);
  const known = report ?? row;
  const lane = report?.attempts.flatMap((attempt) => parts(attempt, elapsed)) ?? (row ? phases(row, now()) : []);
  const span = Math.max(elapsed, known?.total_s ?? 0, 0.001);
  drawLane($("own"), span, [...lane, ...ticks.map((at) => ["tick", at, at])]);
  const perToken = (times.at(-1) - times[0]) / (times.length - 1) / 1000 || null;
  const facts = { "First token": duration(times.length ? (times[0] - startedAt) / 1000 : null), "Between tokens": duration(perToken), Total: duration(known?.total_s), Workers: route(report?.attempts.at(-1) ?? row ?? {}) || "–" };
  describe($("own-facts"), facts);
  $("own").setAttribute("aria-label", `Timeline of the answer: ${Object.entries(facts).map((pair) => pair.join(" ")).join(", ")}`);
}

function say(className, text = "") {
  const paragraph = element("p", { className, textContent: text });
  $("talk").append(paragraph);
  $("talk").scrollTop = $("talk").scrollHeight;
  return paragraph;
}

async function stream(path, sent, paragraph) {
  const control = new AbortController();
  stopAnswer = () => control.abort();
  const headers = { "content-type": "application/json", "x-request-id": answer.id };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(sent), signal: control.signal });
  if (response.status === 401) throw new Error(KEY_NEEDED);
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const [, data] of events(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (!event.choices.length) continue;
    answer.content += event.choices[0].delta?.content ?? "";
    answer.isCut ||= event.choices[0].finish_reason === "length";
    append(paragraph, newTokens(event.choices[0]));
    schedule();
  }
}

async function ask() {
  const prompt = $("prompt").value;
  $("prompt").value = "";
  say("user", prompt);
  const conversation = messages; // "Clear" begins another
  conversation.push({ role: "user", content: prompt });
  answer?.tokens[selected]?.node.classList.remove("at");
  answer = { id: `page-${crypto.getRandomValues(new Uint32Array(2)).join("")}`, tokens: [], times: [], content: "", startedAt: performance.now() };
  selected = -1;
  mine.add(answer.id);
  const paragraph = say("assistant");
  $("beside").hidden = false;
  write($("send"), "Stop");
  $("send").formNoValidate = true; // the prompt may be empty
  try {
    await stream(...requestOf(prompt), paragraph);
    if (answer.isCut) say("note", "Cut: “Tokens” allows no more.");
    write($("said"), `The answer is ${answer.isCut ? "cut" : "complete"}: ${paragraph.textContent}`);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    // The browser's own words say only "Failed to fetch" or "network error".
    const reason = error instanceof TypeError ? "the router cannot be reached, or has closed the connection" : error.message;
    if (!isStopped) say("error", `✕ ${reason}`);
    if (!isStopped && !answer.content) $("prompt").value ||= prompt;
    write($("said"), isStopped ? "Stopped" : `It failed: ${reason}`);
  }
  answer.endedAt = performance.now();
  select(answer.tokens.length - 1);
  // A prompt without an answer would make the next request fail too.
  if (answer.content) conversation.push({ role: "assistant", content: answer.content });
  else conversation.pop();
  stopAnswer = null;
  write($("send"), "Send");
  $("send").formNoValidate = false;
  const own = answer;
  own.report = (await reportOf(own.id))?.choices[0];
  schedule();
}

function describeMode() {
  const { has_chat, has_text } = cluster.about;
  write($("mode"), has_chat ? "chat" : has_text ? "completion: a base model" : "completion: token ids, there is no tokenizer");
  if (has_text === false) $("prompt").placeholder = "Token ids, such as 1 2 3";
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stopAnswer) stopAnswer();
  else ask();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!stopAnswer) $("ask").requestSubmit();
});
$("talk").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !answer?.tokens.length) return;
  event.preventDefault();
  select(Math.min(Math.max(selected + step, 0), answer.tokens.length - 1));
  answer.tokens[selected].node.scrollIntoView({ block: "nearest" });
  const { text, logprob } = answer.tokens[selected];
  write($("said"), `${text}, ${(100 * Math.exp(logprob)).toFixed(1)} percent`);
});
$("talk").addEventListener("pointerover", (event) => {
  const token = answer?.tokens[event.target.dataset.index];
  if (token?.node === event.target) select(Number(event.target.dataset.index));
});
$("clear").addEventListener("click", () => {
  stopAnswer?.();
  messages = [];
  $("talk").replaceChildren();
  $("beside").hidden = true;
});
