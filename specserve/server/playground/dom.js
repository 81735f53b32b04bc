// Elements of the page that several modules make.

export function made(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

export function button(name, title, onClick) {
  const element = made("button", "quiet", name);
  element.type = "button";
  element.title = title;
  element.addEventListener("click", onClick);
  return element;
}

// Returns a button that copies a text. If the page may not write to the clipboard, it selects the text that is shown.
export function copyButton(name, title, shown, text = () => shown.textContent) {
  const copy = button(name, title, async () => {
    getSelection().selectAllChildren(shown);
    const done = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    copy.textContent = done ? "Copied" : "Selected";
    setTimeout(() => { copy.textContent = name; }, 2000);
  });
  copy.classList.add("copy");
  return copy;
}
