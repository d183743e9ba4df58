// The page's elements by their id, and new ones whose text is only ever text.

export const at = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
