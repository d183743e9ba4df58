// The search page: words or a picture go to the gateway, its answer becomes a grid. Nothing leaves this origin, and
// nothing that a server says is ever read as HTML.

import { at, make } from "./elements.js";
import { call, PAGE_SIZE, Problem, search, token } from "./gateway.js";
import { showResults, time } from "./results.js";

const MOST = 96;
const NOTHING = { kind: "nothing" };

const pictures = new Map(); // Files that were searched with, by the key in history.state: "back" finds them again.
let running = new AbortController(); // Of the newest search. An older one is aborted, and its answer ignored.
let current = NOTHING;
let countdown = 0;
let retry = () => {};

// --- A search ----------------------------------------------------------------------------------------------------

/** Search and show, newest first: whatever is under way for an older query is dropped. */
async function ask(query, { push = true, focus = null } = {}) {
  running.abort();
  const { signal } = (running = new AbortController());
  current = query;
  if (push) remember(query);
  fill(query);
  clearProblem();
  if (query.kind === "nothing") return home();
  busy(true);
  try {
    const answer = await search(query, signal);
    if (!signal.aborted) showAnswer(query, answer, focus);
  } catch (error) {
    if (!signal.aborted) showProblem(error, () => ask(query, { push: false }), query);
  } finally {
    if (!signal.aborted) busy(false);
  }
}

function home() {
  busy(false);
  at.results.hidden = true;
  at.start.hidden = false;
  at.status.textContent = "";
  document.title = "Image search";
}

function busy(yes) {
  at.form.setAttribute("aria-busy", yes);
  at.results.setAttribute("aria-busy", yes);
}

/** The controls say what is being searched for. */
function fill(query) {
  at.words.value = query.kind === "words" ? query.text : "";
  at.clear.hidden = query.kind === "nothing";
  if (query.kind === "words") at.form.elements.mode.value = query.mode;
}

// --- History: words and "more like this" are in the address, pictures live as long as the tab --------------------

function remember(query) {
  const url = new URL("./", document.baseURI);
  let state = null;
  if (query.kind === "words") {
    url.searchParams.set("q", query.text);
    if (query.mode !== "hybrid") url.searchParams.set("mode", query.mode);
  } else if (query.kind === "like") {
    url.searchParams.set("like", query.id);
    state = { name: query.name };
  } else if (query.kind === "picture") {
    state = { picture: `${Date.now()}-${pictures.size}` };
    pictures.set(state.picture, query.file);
  }
  if (url.href !== location.href || state?.picture || history.state?.picture) history.pushState(state, "", url);
}

function remembered() {
  const asked = new URL(location.href).searchParams;
  if (asked.get("q")) {
    const mode = ["vector", "text"].find((name) => name === asked.get("mode")) ?? "hybrid";
    return { kind: "words", text: asked.get("q"), mode };
  }
  if (asked.get("like")) return { kind: "like", id: asked.get("like"), name: history.state?.name ?? "this one" };
  const file = pictures.get(history.state?.picture);
  return file ? { kind: "picture", file } : NOTHING;
}

// --- The answer --------------------------------------------------------------------------------------------------

function showAnswer(query, answer, focus) {
  const within = at.grid.contains(document.activeElement);
  at.start.hidden = true;
  at.results.hidden = false;
  const title = query.kind === "words" ? `“${query.text}”` : `Pictures like ${query.file?.name || query.name || "this one"}`;
  at.summary.textContent = title;
  document.title = `${title} – Image search`;
  const found = answer.results.length;
  at.count.textContent = found ? `${found} result${found > 1 ? "s" : ""} in ${time(answer.took)}` : nothing(query);
  at.status.textContent = `${title}: ${at.count.textContent}`;
  showResults(query, answer, running.signal, (hit) => ask({ kind: "like", id: hit.id, name: hit.caption || hit.source }));
  at.more.hidden = found < (query.limit ?? PAGE_SIZE) || found >= MOST;
  notice("ready", null);
  about(answer.model);
  if (focus !== null || within) at.grid.querySelectorAll(".card")[focus ?? 0]?.focus();
  if (focus === null && within) window.scrollTo(0, 0);
}

function nothing({ kind, mode }) {
  return kind === "words" && mode === "text" ? "No caption has these words." : "Nothing found.";
}

// --- Problems, in words ------------------------------------------------------------------------------------------

function showProblem(error, again, query = null) {
  if (!(error instanceof Problem)) {
    console.error(error);
    error = new Problem({ title: "This page failed.", detail: String(error), remedy: "Reload it." });
  }
  const needsToken = error.status === 401;
  const refused = needsToken && Boolean(token.get());
  const within = at.results.contains(document.activeElement);
  at.problem.hidden = false;
  at.results.hidden = true;
  at.start.hidden = true;
  at["problem-title"].textContent = needsToken && !refused ? "This server asks for an access token." : error.title;
  at["problem-detail"].textContent = refused ? "The token was not accepted." : needsToken ? "" : error.detail;
  at["problem-detail"].hidden = error.detail === error.title && !refused;
  at["problem-remedy"].textContent = needsToken ? "Whoever runs it has one. It is kept until this tab closes." : error.remedy;
  at["problem-request"].textContent = error.request && !needsToken ? `Request ${error.request}` : "";
  at.access.hidden = !needsToken;
  at.status.textContent = "";
  document.title = "Image search";
  if (needsToken) at.token.focus();
  else if (within) at.problem.focus();
  const passes = [0, 429, 502, 503, 504].includes(error.status);
  at.again.hidden = !passes;
  at.problem.className = needsToken && !refused ? "question" : passes ? "passing" : "";
  retry = again;
  if (passes) wait(error.retryAfter ?? 0);
  at.smaller.hidden = !(error.status === 413 && query?.file);
  at.smaller.onclick = async () => {
    const file = await smaller(query.file).catch(() => null);
    if (file) return ask({ ...query, file });
    at["problem-remedy"].textContent = "This browser cannot read the picture. Make it smaller with another program.";
    at.smaller.hidden = true;
  };
}

function clearProblem() {
  clearInterval(countdown);
  at.problem.hidden = true;
}

/** Count down what the server asked for, then offer the search again. */
function wait(left) {
  clearInterval(countdown);
  const tick = () => {
    at.again.setAttribute("aria-disabled", left > 0);
    at.again.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left-- > 0) return;
    clearInterval(countdown);
    if (countdown) at.status.textContent = "You can try again now.";
    countdown = 0;
  };
  countdown = left > 0 ? setInterval(tick, 1000) : 0;
  tick();
}

/** A JPEG copy of at most 1024 pixels a side, made here because somebody asked for it. */
async function smaller(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, 1024 / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
  return new File([blob], file.name.replace(/\.\w+$/, "") + ".jpg", { type: blob.type });
}

// --- What the server is ------------------------------------------------------------------------------------------

async function status() {
  at.forget.hidden = !token.get();
  const { ready, reason, index, model, version } = await (await call("api/v1/status", { cache: "no-store" })).json();
  const items = index && `${index.items.toLocaleString("en")} picture${index.items === 1 ? "" : "s"}`;
  at.facts.textContent = [items, model?.name].filter(Boolean).join(" · ");
  const weights = model?.weights_sha256 && `weights ${model.weights_sha256.slice(0, 12)}`;
  at.served.textContent = [model?.name, model?.pretrained, weights, index?.engine, `clip-deploy ${version}`].filter(Boolean).join(" · ");
  const usable = Boolean(index);
  at.form.toggleAttribute("inert", !usable);
  at.form.setAttribute("aria-disabled", !usable);
  notice("ready", ready === false && ["The gateway is not ready. ", `${reason ?? ""} `, ""]);
  notice("index", !usable && [
    "There is no index, so there is nothing to search. ",
    "Make one of a folder of pictures, and start the gateway with it: ",
    "clip-deploy index add PICTURES --triton HOST:PORT --index pictures.index\nclip-deploy gateway --triton HOST:PORT --index pictures.index",
  ]);
  notice("empty", index?.items === 0 && [
    "The index is empty. ", "Add pictures to it: ", "clip-deploy index add PICTURES --triton HOST:PORT --index pictures.index",
  ]);
  about(model);
  return usable;
}

function about(model) {
  notice("untrained", model?.trained === false && [
    "The model is untrained: its weights are random. ",
    "The vectors mean nothing and find arbitrary pictures; only a picture still finds itself. Real answers need real weights: ",
    `clip-deploy export ${model.name} --pretrained TAG`,
  ]);
}

/** One notice by its name: shown once, replaced, or taken away. */
function notice(name, words) {
  at.notices.querySelector(`[data-name="${name}"]`)?.remove();
  if (words) {
    const [first, rest, command] = words;
    const box = make("p");
    box.append(make("strong", "", first), rest, command && make("code", "", command));
    box.dataset.name = name;
    at.notices.append(box);
  }
  at.notices.hidden = !at.notices.childElementCount;
}

// --- Hands -------------------------------------------------------------------------------------------------------

const isPicture = (file) => !file.type || file.type.startsWith("image/");

function searchWith(files) {
  if (at.form.inert || !files.length) return;
  const file = [...files].find(isPicture);
  if (file) return ask({ kind: "picture", file });
  running.abort();
  busy(false);
  showProblem(new Problem({
    status: 415,
    title: `${files[0].name} is not a picture.`,
    remedy: "Choose a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file.",
  }));
}

at.form.onsubmit = (event) => {
  event.preventDefault();
  const text = at.words.value.trim();
  if (text) ask({ kind: "words", text, mode: at.form.elements.mode.value });
  else at.words.focus();
};
at.form.onchange = ({ target }) => {
  if (target.name === "mode" && current.kind === "words") {
    ask({ kind: "words", text: at.words.value.trim() || current.text, mode: target.value });
  }
  if (target.files) searchWith(target.files);
  if (target.files) target.value = ""; // the same file may be chosen again
};
at.words.oninput = () => (at.clear.hidden = !at.words.value && current.kind === "nothing");
at.clear.onclick = clear;
at.home.onclick = (event) => (event.preventDefault(), clear());
at.more.onclick = () => {
  const had = at.grid.childElementCount;
  ask({ ...current, limit: Math.min(MOST, had * 2) }, { push: false, focus: had });
};
at.examples.onclick = ({ target }) => {
  if (target.closest("button")) ask({ kind: "words", text: target.textContent, mode: "hybrid" });
};
at.again.onclick = () => at.again.getAttribute("aria-disabled") === "true" || retry();
at.access.onsubmit = async (event) => {
  event.preventDefault();
  token.set(at.token.value);
  at.token.value = "";
  await begin();
  if (at.problem.hidden) toContent();
};
at.target.onclick = () => at.file.click();
at.forget.onclick = () => (token.remove(), location.reload());

at.skip.onclick = (event) => {
  event.preventDefault();
  toContent();
};

function toContent() {
  (at.results.hidden ? at.start : at.results).focus();
}

function clear() {
  ask(NOTHING);
  at.words.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const editing = document.activeElement.matches("input:not([type=radio], [type=file])");
  if (event.key === "/" && !editing) {
    event.preventDefault();
    at.words.focus();
    at.words.select();
  } else if (event.key === "Escape" && document.activeElement !== at.token) clear();
  else if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") move(event);
});

/** Arrow keys: from the words down into the grid, through it, and back up. */
function move(event) {
  const cards = [...at.grid.querySelectorAll(".card")];
  const here = cards.indexOf(document.activeElement);
  if (at.results.hidden || !cards.length) return;
  let next;
  if (here < 0) {
    if (event.key !== "ArrowDown" || ![at.words, at.results].includes(document.activeElement)) return;
    next = 0;
  } else {
    const columns = getComputedStyle(at.grid).gridTemplateColumns.split(" ").length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -here, End: cards.length - 1 - here };
    next = here + steps[event.key];
  }
  event.preventDefault();
  if (next < 0 && event.key === "ArrowUp") at.words.focus();
  else cards[next]?.focus();
}

document.addEventListener("paste", (event) => {
  const { files } = event.clipboardData;
  const typing = document.activeElement.matches("input") && event.clipboardData.getData("text/plain");
  if (!files.length || typing) return;
  event.preventDefault();
  searchWith(files);
});

const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  at.drop.hidden = at.form.inert;
});
addEventListener("dragleave", (event) => event.relatedTarget ?? (at.drop.hidden = true));
addEventListener("drop", (event) => {
  at.drop.hidden = true;
  if (!carriesFiles(event)) return;
  event.preventDefault();
  searchWith(event.dataTransfer.files);
});

addEventListener("popstate", () => ask(remembered(), { push: false }));

async function begin() {
  clearProblem();
  try {
    if (!(await status())) return;
    await ask(current === NOTHING ? remembered() : current, { push: false });
    if (current === NOTHING && matchMedia("(pointer: fine)").matches) at.words.focus();
  } catch (error) {
    showProblem(error, begin);
  }
}

await begin();
