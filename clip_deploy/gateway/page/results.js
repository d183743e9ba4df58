// An answer as a person sees it: what was asked with, the time of each stage, and a grid of pictures.

import { at, make } from "./elements.js";
import { call, thumbnail, token } from "./gateway.js";

let urls = []; // Object URLs on show, to be revoked with what shows them.

/** Show an answer; `like` is called with the result that somebody chooses. */
export function showResults(query, answer, signal, like) {
  urls.forEach((url) => URL.revokeObjectURL(url));
  urls = [];
  showAsked(query, signal);
  showTimes(answer.stages);
  at.grid.replaceChildren(...answer.results.map((hit) => card(hit, signal, like)));
}

function showAsked(query, signal) {
  at.asked.hidden = query.kind === "words";
  at.asked.onerror = () => (at.asked.hidden = true); // a format that this browser cannot show
  if (query.kind === "like") showPicture(at.asked, query.id, signal);
  if (query.kind === "picture") at.asked.src = kept(query.file);
}

function showTimes(list) {
  at.bar.replaceChildren(
    ...list.map(([stage, ms]) => {
      const part = make("span", stage);
      part.style.flexGrow = ms;
      return part;
    }),
  );
  at.stages.replaceChildren(
    ...list.map(([stage, ms]) => {
      const row = make("div", stage);
      row.append(make("dt", "", stage), make("dd", "", time(ms)));
      return row;
    }),
  );
}

function card(hit, signal, like) {
  const item = at.card.content.cloneNode(true).firstElementChild;
  const part = (name) => item.querySelector(name);
  part(".caption").textContent = hit.caption || hit.source || hit.id;
  part(".source").textContent = hit.caption ? hit.source : "";
  part(".source").title = hit.source ?? "";
  const same = hit.cosine !== null && Math.abs(hit.score - hit.cosine) < 1e-6;
  part(".scores").append(
    fact("score", hit.score.toPrecision(3).replace("-", "−")),
    same || hit.cosine === null ? "" : fact("cosine", hit.cosine.toFixed(3).replace("-", "−")),
    hit.vector_rank ? fact("picture", `#${hit.vector_rank}`, "rank") : "",
    hit.text_rank ? fact("caption", `#${hit.text_rank}`, "rank") : "",
  );
  const image = part("img");
  image.onerror = () => (part(".picture").classList.add("none"), image.remove());
  if (hit.thumbnail) showPicture(image, hit.id, signal);
  else image.onerror();
  part("button").onclick = () => like(hit);
  return item;
}

function fact(name, value, kind = "") {
  const item = make("span", kind, `${name} `);
  item.append(make("b", "", value), " ");
  return item;
}

/** A thumbnail: straight from its address, or fetched with the token where there is one. */
async function showPicture(image, id, signal) {
  if (!token.get()) {
    image.src = thumbnail(id);
    return;
  }
  try {
    const blob = await (await call(thumbnail(id), { signal })).blob();
    if (!signal.aborted) image.src = kept(blob);
  } catch {
    if (!signal.aborted) image.onerror();
  }
}

function kept(blob) {
  urls.push(URL.createObjectURL(blob));
  return urls.at(-1);
}

export function time(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms`;
}
