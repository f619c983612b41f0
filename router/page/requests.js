// The latest requests as a waterfall: a table with a timeline in each row, and a dialog for one.

const SPANS = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 20, 30, 60, 120, 300, 600]; // seconds
const NARROWEST = 0.8; // what is drawn, of a lane of 300
const FRAME_MS = 60; // between two frames of what moves
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const mine = new Set(); // the ids of this page's own requests
let shown = [];
let paused = null; // the rows and the time at which they stand still
let spanS = SPANS[0];
let isAnimating = false;
let lastFrame = 0;

const isFailed = (row) => row.total_s != null && !GOOD.includes(row.state);
const words = (row) => `${row.id} ${row.state} ${row.prefill ?? ""} ${row.decode ?? ""}`.toLowerCase();
const maxShown = () => (innerWidth < 760 ? 12 : innerWidth < 1800 ? 22 : 40);

function chooseRows() {
  const rows = paused?.rows ?? [...cluster.rows.values()];
  const wanted = $("filter").value.trim().toLowerCase().split(/\s+/);
  const found = rows.filter((row) => wanted.every((word) => words(row).includes(word)));
  found.sort((a, b) => b.at - a.at);
  shown = found.slice(0, maxShown());
  const some = found.length > shown.length ? `the latest ${shown.length} of ${found.length}` : `${found.length}`;
  write($("matches"), wanted[0] ? `${some} that match, of ${rows.length}` : "");
  $("no-rows").hidden = shown.length > 0;
  write($("no-rows"), rows.length ? "None of the latest requests matches the filter." : "No requests yet. Ask something in the playground.");
}

// Chooses the span of the timelines and returns their end: now while a request is open, otherwise
// the last end, so that a quiet page stands still.
function chooseSpan() {
  const time = paused?.at ?? now();
  const isLive = shown.some((row) => row.total_s == null);
  const end = isLive ? time : Math.max(0, ...shown.map((row) => row.at + row.total_s));
  const lengths = shown.map((row) => row.total_s ?? time - row.at).sort((a, b) => a - b);
  const middle = lengths[Math.floor(lengths.length / 2)] ?? 1;
  const needed = Math.min(Math.max(end - Math.min(end, ...shown.map((row) => row.at)), middle), 20 * middle);
  const fitting = SPANS.find((span) => span >= needed) ?? SPANS.at(-1);
  if (fitting > spanS || needed < spanS / 2) spanS = fitting;
  write($("span"), `Timeline, ${spanS < 1 ? `${spanS * 1000} ms` : `${spanS} s`}`);
  return end;
}

const makeLane = () => drawn("svg", { class: "lane", viewBox: "0 0 300 18", preserveAspectRatio: "none", "aria-hidden": true });

function makeRow() {
  const row = element("tr");
  const cells = ["", "wide", "", "num wide", "num", "num wide", "outcome"];
  row.append(...cells.map((className) => element("td", { className })));
  row.firstChild.append(element("button", { type: "button", className: "link" }));
  row.children[2].append(makeLane(), element("small"));
  return row;
}

function fillRow(node, row) {
  const [id, workers, , first, total, tokens, outcome] = node.children;
  node.dataset.key = row.key;
  node.classList.toggle("own", mine.has(row.id));
  write(id.firstChild, row.id.replace(/^page-/, "").slice(0, 12) || "(no id)");
  write(workers, route(row));
  write(first, duration(row.ttft_s));
  write(total, row.total_s == null ? "…" : duration(row.total_s));
  write(tokens, amount(row.tokens ?? 0));
  outcome.classList.toggle("failed", isFailed(row));
  const attempts = row.attempts > 1 ? ` (${row.attempts})` : "";
  write(outcome, (isFailed(row) ? "✕ " : "") + row.state.replaceAll("_", " ") + attempts);
}

function drawRows() {
  chooseRows();
  const body = $("rows");
  const active = document.activeElement?.closest?.("#rows tr");
  const key = active?.dataset.key;
  while (body.childElementCount < shown.length) body.append(makeRow());
  while (body.childElementCount > shown.length) body.lastChild.remove();
  shown.forEach((row, i) => fillRow(body.children[i], row));
  // The focus stays with the request, wherever its row is now.
  const index = shown.findIndex((row) => row.key === key);
  if (key && index >= 0 && body.children[index] !== active) body.children[index].querySelector("button").focus({ preventScroll: true });
  drawLanes();
  if (!isAnimating) animate();
}

// The phases of a request as [name, from, to], in seconds since it was submitted.
function phases(row, time) {
  const end = row.total_s ?? time - row.at;
  const placed = row.queue_s ?? end;
  const first = row.ttft_s ?? end;
  const found = [["queue", 0, placed], ["prefill", placed, first], ["decode", first, end]].filter(([, from, to]) => to > from);
  if (row.transfer_s) found.push(["transfer", row.transfer_at_s, row.transfer_at_s + row.transfer_s]);
  if (isFailed(row)) found.push(["failed", end, end]);
  return found;
}

// Draws such phases over the width of an SVG that shows `span` seconds.
const SHAPES = { queue: [7, 4], transfer: [16, 2], segment: [15, 3], stall: [3, 3], failed: [0, 18], tick: [21, 7] };
// Every part is wide enough to be seen, also at the end of the lane.
function drawLane(svg, span, items) {
  while (svg.childElementCount < items.length) svg.append(drawn("rect", {}));
  while (svg.childElementCount > items.length) svg.lastChild.remove();
  items.forEach(([name, from, to], i) => {
    const [y, height] = SHAPES[name] ?? [3, 12];
    const x = Math.min((300 * from) / span, 300 - NARROWEST);
    const places = { class: name, x, y, height, width: Math.max(NARROWEST, (300 * to) / span - x) };
    for (const [key, value] of Object.entries(places)) svg.children[i].setAttribute(key, value);
  });
}

function drawLanes() {
  const end = chooseSpan();
  shown.forEach((row, i) => {
    const [lane, before] = $("rows").children[i].children[2].children;
    const begin = row.at - end + spanS;
    const isBefore = row.total_s != null && begin + row.total_s <= 0;
    drawLane(lane, spanS, isBefore ? [] : phases(row, end).map(([name, from, to]) => [name, begin + from, begin + to]));
    write(before, isBefore ? `‹ ${duration(end - row.at)} before` : "");
  });
}

function animate(time = 0) {
  isAnimating = !paused && !calm.matches && shown.some((row) => row.total_s == null);
  if (isAnimating) requestAnimationFrame(animate);
  if (time - lastFrame < FRAME_MS) return;
  lastFrame = time;
  drawLanes();
}

// The parts of an attempt as its workers reported them, or as far as the router knows.
function parts({ timeline: it }, elapsed) {
  const end = it.duration_s == null ? elapsed : it.at_s + it.duration_s;
  const each = (name, found) => (found ?? []).map((part) => [name, part.at_s, part.at_s + part.duration_s]);
  const first = it.first_token_s ?? end;
  const begin = it.prefill?.at_s ?? it.at_s;
  const found = [
    ["queue", it.at_s - it.queue_s, begin],
    ["prefill", begin, it.prefill ? begin + it.prefill.duration_s : first],
    ...each("chunk", it.prefill?.chunks),
    ...(it.decode ? each("decode", [it.decode]) : [["decode", first, end]]),
    ...each("stall", it.decode?.stalls),
    ...["gap", "queue"].flatMap((name) => each(name, it.preemptions)),
    ...each("transfer", it.transfer && [it.transfer]),
    ...each("segment", it.transfer?.segments),
  ].filter(([, from, to]) => to > from);
  return it.outcome && !GOOD.includes(it.outcome) ? [...found, ["failed", end, end]] : found;
}

// A line of text and a lane for each attempt, all over the same time.
function drawAttempts(attempts, elapsed) {
  const found = attempts.map((attempt) => parts(attempt, elapsed));
  const span = Math.max(0.001, ...found.flat().map(([, , to]) => to));
  write($("detail-span"), duration(span));
  $("attempts").replaceChildren(...attempts.map((attempt, i) => {
    const { outcome, failed } = attempt.timeline;
    const lane = makeLane();
    drawLane(lane, span, found[i]);
    return element("li", {}, `${route(attempt)}: ${outcome?.replaceAll("_", " ") ?? "running"}${failed ? `, ${failed} failed` : ""}`, lane);
  }));
}

async function reportOf(id) {
  const response = await call(`v1/requests/${encodeURIComponent(id)}`).catch(() => null);
  return response?.ok ? response.json() : null;
}

async function showDetail(row) {
  describe($("detail-facts"), { Id: row.id, Outcome: row.state.replaceAll("_", " "), Workers: route(row), Attempts: row.attempts, "Prompt tokens": `${row.prompt}, ${row.cached ?? 0} of them cached`, "Generated tokens": row.tokens ?? 0, Queue: duration(row.queue_s), "First token": duration(row.ttft_s), Transfer: row.transfer_s && `${duration(row.transfer_s)}, ${amount(row.kv_bytes)}B`, Total: duration(row.total_s) });
  write($("detail-note"), "…");
  $("detail-more").hidden = true;
  $("detail").dataset.key = row.key;
  $("detail").showModal();
  const report = await reportOf(row.id);
  if ($("detail").dataset.key !== row.key) return; // another was opened meanwhile
  $("detail-more").hidden = !report;
  write($("detail-note"), report ? "" : "The router tells more only to the client that sent it.");
  if (!report) return;
  drawAttempts(report.choices.flatMap((choice) => choice.attempts), now() - row.at);
  write($("detail-report"), JSON.stringify(report, null, 2));
}

$("rows").addEventListener("click", (event) => {
  const key = event.target.closest("button")?.closest("tr").dataset.key;
  const row = shown.find((each) => each.key === key);
  if (row) showDetail(row);
});
$("detail-close").addEventListener("click", () => $("detail").close());
$("filter").addEventListener("input", () => {
  drawRows();
  write($("said"), $("matches").textContent);
});
$("pause").addEventListener("click", () => {
  paused = paused ? null : { rows: structuredClone([...cluster.rows.values()]), at: now() };
  $("pause").setAttribute("aria-pressed", Boolean(paused));
  drawRows();
});
