// Elements, numbers as text, requests with the API key and the theme, for all parts of the page.

const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Does nothing if the text is there already, which would cost a layout.
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Fills a <dl>; facts without a value are left out.
function describe(list, facts) {
  const texts = Object.entries(facts).filter(([, value]) => value != null && value !== "").flat();
  if (list.textContent === texts.join("")) return;
  list.replaceChildren(...texts.map((text, i) => element(i % 2 ? "dd" : "dt", { textContent: text })));
}

const GOOD = ["stop", "length", "cancelled"]; // outcomes that are no failure; a client cancels
const route = (it) => [it.prefill, it.decode].filter(Boolean).join(" → ");

function amount(n) {
  if (n >= 1e9) return (n / 1e9).toFixed(1) + "G";
  if (n >= 1e6) return (n / 1e6).toFixed(1) + "M";
  if (n >= 1e4) return (n / 1e3).toFixed(n >= 1e5 ? 0 : 1) + "k";
  return n >= 100 || Number.isInteger(n) ? Math.round(n).toLocaleString("en") : n.toFixed(1);
}

function duration(s) {
  if (s == null) return "–";
  if (s < 0.001) return (s * 1e6).toFixed(0) + " µs";
  if (s < 1) return (s * 1e3).toFixed(s < 0.1 ? 1 : 0) + " ms";
  return s < 100 ? s.toFixed(s < 10 ? 2 : 1) + " s" : (s / 60).toFixed(1) + " min";
}

const rate = (bytesPerS) =>
  bytesPerS >= 1e8 ? (bytesPerS / 1e9).toFixed(2) + " GB/s" : (bytesPerS / 1e6).toFixed(1) + " MB/s";

function showHealth(state, text) {
  $("health").dataset.state = state;
  write($("health"), text);
}

// The key is kept until the tab is closed, and sent in a header, never in an address.
const KEY = "baton-key";
const KEY_NEEDED = "An API key is needed";
const storedKey = () => sessionStorage.getItem(KEY);
let keyGiven = Promise.resolve(); // resolves when there is a key to try

// Sends a request to the router with the API key; asks for another key if the router refuses it.
async function call(path, { headers = {}, ...options } = {}) {
  const key = storedKey();
  const response = await fetch(path, { ...options, headers: key ? { authorization: `Bearer ${key}`, ...headers } : headers });
  if (response.status === 401 && storedKey() === key) askKey();
  return response;
}

// Hides the panels until events arrive that were asked for with the stored key.
function lock(text) {
  $("detail").close();
  $("locked").hidden = false;
  showHealth("joining", text);
}

function openKeyDialog() {
  $("key-forget").hidden = !storedKey();
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function askKey() {
  if (storedKey()) write($("key-problem"), "That key is not valid here.");
  sessionStorage.removeItem(KEY);
  keyGiven = new Promise((resolve) => $("key-form").addEventListener("submit", resolve, { once: true }));
  lock(KEY_NEEDED);
  $("key").hidden = false;
  openKeyDialog();
}

$("key").hidden = !storedKey();
$("key").addEventListener("click", openKeyDialog);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key-input").value.trim());
  write($("key-problem"), "");
  $("key-dialog").close();
  lock("Connecting");
});
$("key-dialog").addEventListener("close", () => ($("key-input").value = ""));
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
// The page is loaded again, so that nothing stays of what the key has shown.
$("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  write($("theme"), `◐ ${theme}`);
  $("theme").setAttribute("aria-label", `Theme: ${theme}`);
  localStorage.setItem("baton-theme", theme);
}

setTheme(localStorage.getItem("baton-theme") ?? "auto");
$("theme").addEventListener("click", () => {
  const next = THEMES.indexOf(document.documentElement.dataset.theme) + 1;
  setTheme(THEMES[next % THEMES.length]);
});
