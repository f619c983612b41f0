// The four figures: a number of the last seconds, and a line of the last minutes.

const NUM_BINS = 60;
const SPANS_S = [120, SPAN_S]; // of a line: the shortest that all points fit in
const FIRST_S = 1e-5; // buckets of durations as in activity.py
const GROWTH = 1.1;

const sum = (counts) => Object.values(counts ?? {}).reduce((total, n) => total + n, 0);

function merge(points, name) {
  const total = {};
  for (const point of points) {
    for (const [key, n] of Object.entries(point[name] ?? {})) total[key] = (total[key] ?? 0) + n;
  }
  return total;
}

const work = (points, field) => sum(points.flatMap((point) => Object.values(point.work ?? {}).map((done) => done[field])));

// A quantile of durations that were counted in buckets, in seconds; null if there are none.
function quantile(counts, share) {
  const sorted = Object.entries(counts).sort((a, b) => a[0] - b[0]);
  let left = share * sum(counts);
  for (const [bucket, n] of sorted) {
    if ((left -= n) <= 0) return FIRST_S * GROWTH ** (Number(bucket) + 0.5);
  }
  return null;
}

function recent(seconds = RECENT_S) {
  const end = cluster.points.at(-1)?.now ?? 0;
  const points = cluster.points.filter((point) => point.now > end - seconds);
  const before = cluster.points[cluster.points.length - points.length - 1];
  const start = before?.now ?? points[0]?.now ?? 0;
  return { points, span: Math.max(0.5, end - start) };
}

// Cuts the points into bins whose borders stand still, so that a line does not tremble.
function bins() {
  const end = cluster.points.at(-1)?.now ?? 0;
  const age = end - (cluster.points[0]?.now ?? 0);
  const spanS = SPANS_S.find((span) => span > age) ?? SPAN_S;
  document.querySelectorAll(".axis .past").forEach((node) => write(node, `${spanS / 60} min`));
  const binS = spanS / NUM_BINS;
  const last = Math.ceil(end / binS);
  const found = Array.from({ length: NUM_BINS }, () => []);
  for (const point of cluster.points) {
    found[NUM_BINS - 1 - (last - Math.ceil(point.now / binS))]?.push(point);
  }
  found.pop(); // it is not full yet
  return [found, binS];
}

function line(values, top) {
  let path = "";
  values.forEach((value, i) => {
    if (value === null) return;
    const x = (300 * i) / (values.length - 1);
    const y = 60 - (58 * value) / top;
    path += `${path && values[i - 1] !== null ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  return path;
}

// Shows a figure; `text` formats the peak of its one or two lines.
function show(name, big, small, [first, second], text) {
  const figure = document.querySelector(`[data-chart="${name}"]`);
  const peak = Math.max(1e-9, ...first, ...(second ?? []));
  write(figure.querySelector("b"), big);
  write(figure.querySelector(".muted"), small);
  write(figure.querySelector(".peak"), peak > 1e-9 ? `peak ${text(peak)}` : "");
  const [back, front] = figure.querySelectorAll("path");
  const area = line(first.map((value) => value ?? 0), peak) + "L300 60L0 60Z";
  back.setAttribute("class", second ? "second" : "area");
  back.setAttribute("d", second ? line(second, peak) : area);
  front.setAttribute("d", line(first, peak));
  const said = `${figure.querySelector("figcaption").textContent}: ${figure.querySelector(".big").textContent}`;
  figure.querySelector("svg").setAttribute("aria-label", `${said}, at most ${text(peak)} on this line`);
}

function drawCharts() {
  const { points, span } = recent();
  const [all, binS] = bins();
  const perS = (count) => all.map((bin) => (bin.length ? count(bin) / binS : null));
  const output = work(points, "generated") / span;
  const input = work(points, "prompt") / span;
  const made = perS((bin) => work(bin, "generated"));
  show("tokens", amount(output), `${amount(input)} prompt tokens/s`, [made], amount);

  const ended = merge(points, "ended");
  const failed = sum(ended) - GOOD.reduce((total, outcome) => total + (ended[outcome] ?? 0), 0);
  const { running = 0, waiting = 0 } = cluster.router;
  const state = `${amount(running)} running, ${amount(waiting)} waiting${failed ? `, ${amount(failed)} failed` : ""}`;
  const ends = perS((bin) => sum(merge(bin, "ended")));
  show("requests", amount(sum(ended) / span), state, [ends], amount);

  for (const name of ["ttft", "itl"]) {
    const counts = merge(points, name);
    const merged = all.map((bin) => merge(bin, name));
    const lines = [0.5, 0.99].map((share) => merged.map((bin) => quantile(bin, share)));
    show(name, duration(quantile(counts, 0.5)), `p99 ${duration(quantile(counts, 0.99))}`, lines, duration);
  }
}
