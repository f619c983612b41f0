// The state of the cluster, from the snapshot and the changes that GET /v1/cluster/events sends.

const SPAN_S = 300; // of the charts
const RECENT_S = 10; // of the figures
const MAX_ROWS = 400;
const SILENCE_S = 6; // the router sends once a second

const cluster = { about: {}, router: {}, workers: new Map(), rows: new Map(), points: [] };
let skew = null; // the clock of this page minus that of the router, in seconds

const now = () => performance.now() / 1000 - (skew ?? 0);

function change(target, changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) delete target[name];
    else target[name] = value;
  }
  return target;
}

function changeRow({ key, is_gone, ...changes }) {
  if (is_gone) cluster.rows.delete(key);
  else cluster.rows.set(key, change(cluster.rows.get(key) ?? { key }, changes));
}

function dropOldRows() {
  for (const [key, row] of cluster.rows) {
    if (cluster.rows.size <= MAX_ROWS) return;
    if (row.total_s != null) cluster.rows.delete(key);
  }
}

function take(name, data) {
  const ahead = performance.now() / 1000 - data.now;
  skew = skew === null || name === "snapshot" ? ahead : Math.min(skew + 0.002, ahead);
  if (name === "snapshot") {
    const { now, router, workers, requests, points, ...about } = data;
    Object.assign(cluster, { about, router, points, rows: new Map() });
    cluster.workers = new Map(Object.entries(workers));
    requests.forEach(changeRow);
  } else {
    change(cluster.router, data.router);
    for (const [worker, changes] of Object.entries(data.workers)) {
      if (changes === null) cluster.workers.delete(worker);
      else cluster.workers.set(worker, change(cluster.workers.get(worker) ?? {}, changes));
    }
    data.requests.forEach(changeRow);
    cluster.points.push(data.point);
    while (cluster.points[0].now < data.now - SPAN_S - 5) cluster.points.shift();
  }
  dropOldRows();
  $("locked").hidden = true;
  const { reasons } = cluster.router;
  write($("model"), cluster.about.model);
  showHealth(reasons.length ? "unready" : "ready", reasons.length ? `Not ready: ${reasons.join("; ")}` : "Ready");
  render();
}

// Yields the events of a response as [name, data]; used for the completions too.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const { event = "message", data } = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s)));
      if (data) yield [event, data];
    }
  }
}

async function listen() {
  const key = storedKey();
  const control = new AbortController();
  let timer = setTimeout(() => control.abort(), SILENCE_S * 1000);
  try {
    const response = await call("v1/cluster/events", { signal: control.signal });
    if (response.status === 401) return;
    if (!response.ok) {
      showHealth("unready", (await response.json()).error.message);
    } else {
      for await (const [name, data] of events(response)) {
        if (storedKey() !== key) return; // another key was given, or the router refused this one
        clearTimeout(timer);
        timer = setTimeout(() => control.abort(), SILENCE_S * 1000);
        take(name, JSON.parse(data));
      }
    }
  } finally {
    clearTimeout(timer);
    control.abort();
  }
}

// Connects whenever the stream has ended: the router was restarted, or this machine slept.
async function follow() {
  for (;;) {
    await keyGiven;
    const wasDraining = cluster.router.reasons?.includes("the router is draining");
    await listen().catch(() => showHealth("lost", wasDraining ? "The router has stopped" : "No connection to the router"));
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
