// The workers by role, and the links over which KV goes from prefill to decode.

const DENSE = 12; // more workers than this are a line each
const MAX_WIRES = 64;
const MAX_LABELS = 6;
const LINK_S = 20; // a link is shown as busy this long
const cards = new Map();
const centres = new Map(); // the height of the middle of each card, in the map
let wireWidth = 0;

function makeCard(name) {
  const card = element("li", { className: "worker" });
  const part = (tag, className) => card.appendChild(element(tag, { className }));
  const head = part("div", "head");
  const [role, rank] = name.split("-");
  const named = element("span", { className: "name" }, element("span", { className: "role", textContent: `${role}-` }), rank);
  head.append(named, element("span", { className: "state" }));
  part("p", "why");
  part("div", "bar").append(element("i", { className: "used" }), element("i", { className: "cached" }));
  part("p", "facts").append(...["load", "speed", "blocks", "hits"].map((it) => element("span", { className: it })));
  cards.set(name, card);
  return card;
}

function fact(card, name, value, unit) {
  const node = card.querySelector(`.${name}`);
  if (!node.firstChild) node.append(element("b"), element("span"));
  node.hidden = value === null;
  write(node.firstChild, value ?? "");
  write(node.lastChild, ` ${unit}`);
}

function fillCard(card, name, worker, done, span) {
  const { total, used, cached } = worker.blocks;
  const isLost = worker.state === "lost";
  card.classList.toggle("is-lost", isLost);
  const state = card.querySelector(".state");
  state.dataset.state = worker.state;
  write(state, worker.state);
  card.querySelector(".why").hidden = !worker.why;
  write(card.querySelector(".why"), worker.why);
  const [usedBar, cachedBar] = card.querySelector(".bar").children;
  usedBar.style.width = `${(100 * used) / (total || 1)}%`;
  cachedBar.style.width = `${(100 * cached) / (total || 1)}%`;
  const { prompt = 0, cached: hits = 0, generated = 0 } = done;
  const isPrefill = worker.role === "prefill";
  const waiting = worker.waiting ? ` + ${worker.waiting} waiting` : "";
  fact(card, "load", isLost ? null : amount(Math.max(worker.running, worker.placed)), `running${waiting}`);
  fact(card, "speed", isLost ? null : amount((isPrefill ? prompt - hits : generated) / span), "tokens/s");
  const share = prompt ? `${Math.round((100 * hits) / prompt)} %` : "–";
  fact(card, "hits", isLost || worker.role === "decode" ? null : share, "of prompts cached");
  fact(card, "blocks", isLost ? null : `${amount(used)} / ${amount(total)}`, "blocks");
  const { arithmetic, threads } = worker.computes;
  card.title = `${name}: ${worker.state}. ${cached} blocks cached. ${arithmetic}, ${threads} threads`;
}

function measure() {
  const map = document.querySelector("#cluster .map");
  const top = map.getBoundingClientRect().top;
  centres.clear();
  for (const [name, card] of cards) {
    const box = card.getBoundingClientRect();
    centres.set(name, box.top - top + box.height / 2);
  }
  wireWidth = $("wires").getBoundingClientRect().width;
}

// The links of the last seconds with their bytes and seconds, the busiest first.
function busyLinks() {
  const found = new Map();
  for (const point of recent(LINK_S).points) {
    for (const [link, [bytes, seconds]] of Object.entries(point.links ?? {})) {
      const [b, s] = found.get(link) ?? [0, 0];
      found.set(link, [b + bytes, s + seconds]);
    }
  }
  return [...found].sort((a, b) => b[1][0] - a[1][0]).slice(0, MAX_WIRES);
}

function wire(from, to) {
  const [y1, y2, x] = [centres.get(from), centres.get(to), wireWidth];
  const isLost = (name) => cluster.workers.get(name)?.state === "lost";
  if (y1 === undefined || y2 === undefined || isLost(from) || isLost(to)) return null;
  return { d: `M2 ${y1}C${x / 2} ${y1} ${x / 2} ${y2} ${x - 2} ${y2}`, middle: (y1 + y2) / 2 };
}

function idleWires(prefills, decodes) {
  if (prefills.length * decodes.length > MAX_WIRES) return [];
  return prefills.flatMap((from) => decodes.map((to) => [`${from}>${to}`, null]));
}

function drawWires(prefills, decodes) {
  const busy = busyLinks();
  const most = busy[0]?.[1][0] ?? 1;
  const paths = [];
  const labels = [];
  for (const [link, moved] of [...idleWires(prefills, decodes), ...busy]) {
    const place = wire(...link.split(">"));
    if (!place) continue;
    const path = drawn("path", { d: place.d });
    paths.push(path);
    if (!moved) continue;
    path.setAttribute("class", "busy");
    path.style.strokeWidth = (1 + 4 * Math.sqrt(moved[0] / most)).toFixed(1);
    // Labels that would overlap are left out.
    const isFree = labels.every((other) => Math.abs(other.getAttribute("y") - place.middle) > 17);
    if (labels.length >= MAX_LABELS || !isFree) continue;
    const label = drawn("text", { x: wireWidth / 2, y: place.middle });
    label.textContent = rate(moved[0] / moved[1]);
    labels.push(label);
  }
  $("wires").replaceChildren(...paths, ...labels);
  const said = busy.map(([link, [bytes, s]]) => `${link.replace(">", " → ")}: ${rate(bytes / s)}`);
  write($("links"), said.join("\n") || "None in the last seconds");
}

function drawCluster() {
  const rankOf = (name) => cluster.workers.get(name).rank;
  const names = [...cluster.workers.keys()].sort((a, b) => rankOf(a) - rankOf(b));
  const prefills = names.filter((name) => cluster.workers.get(name).role === "prefill");
  const others = names.filter((name) => !prefills.includes(name));
  const map = document.querySelector("#cluster .map");
  map.classList.toggle("single", !prefills.length);
  map.classList.toggle("dense", names.length > DENSE);
  const hasAny = others.some((name) => cluster.workers.get(name).role === "any");
  write($("right-title"), hasAny ? "Prefill and decode" : "Decode");
  const { points, span } = recent();
  for (const [list, members] of [[$("left"), prefills], [$("right"), others]]) {
    members.forEach((name, i) => {
      const card = cards.get(name) ?? makeCard(name);
      if (list.children[i] !== card) list.insertBefore(card, list.children[i] ?? null);
      const done = { prompt: 0, cached: 0, generated: 0 };
      for (const point of points) {
        const more = point.work?.[name];
        for (const field in more) done[field] += more[field];
      }
      fillCard(card, name, cluster.workers.get(name), done, span);
    });
    while (list.children.length > members.length) {
      cards.delete(list.lastChild.querySelector(".name").textContent);
      list.lastChild.remove();
    }
  }
  const ready = names.filter((name) => cluster.workers.get(name).state === "ready").length;
  const lost = names.filter((name) => cluster.workers.get(name).state === "lost").length;
  write($("workers-ready"), `${ready} of ${names.length} workers ready${lost ? `, ${lost} lost` : ""}`);
  $("workers-ready").dataset.state = lost ? "lost" : "";
  drawWires(prefills, others);
}

new ResizeObserver(() => {
  measure();
  if (cards.size) render();
}).observe(document.querySelector("#cluster .map"));
