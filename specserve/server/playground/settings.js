// The settings panel: a request's fields other than the messages. They stay in this tab, the API key too.

const KEPT = "specserve-settings";
const form = document.querySelector("#settings-form");
const button = document.querySelector("#open-settings");

const kept = JSON.parse(sessionStorage.getItem(KEPT));
if (kept) {
  for (const { name } of form.elements) if (name in kept && name !== "model") form[name].value = kept[name];
  form.colours.checked = "colours" in kept;
}
document.addEventListener("change", () => {
  sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(new FormData(form))));
});
form.addEventListener("submit", (event) => event.preventDefault());

export function openSettings(open) {
  document.body.classList.toggle("settings", open);
  button.setAttribute("aria-expanded", String(open));
}

export const settingsAreOpen = () => document.body.classList.contains("settings");
export const apiKey = () => form.key.value.trim();
export const systemPrompt = () => form.system.value.trim();

export function onKey(listener) {
  form.key.addEventListener("change", listener);
}

for (const field of [form.tools, form.schema]) {
  const check = () => field.setCustomValidity(fault(field.value));
  field.addEventListener("input", check);
  check();
}

function fault(text) {
  try {
    read(text);
    return "";
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}

function read(text) {
  return text.trim() ? JSON.parse(text) : undefined;
}

export function askForKey() {
  openSettings(true);
  form.key.focus();
}

export function showModels(names) {
  const chosen = form.model.value || kept?.model;
  form.model.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

// Returns null if a field is invalid; the browser then shows which and why.
export function sampling() {
  if (!form.checkValidity()) {
    openSettings(true);
    form.reportValidity();
    return null;
  }
  const schema = read(form.schema.value);
  return {
    model: form.model.value,
    tools: read(form.tools.value),
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
    temperature: form.temperature.valueAsNumber,
    top_p: form.top_p.valueAsNumber,
    max_tokens: form.max_tokens.valueAsNumber,
    seed: form.seed.value === "" ? Math.floor(Math.random() * 2 ** 31) : form.seed.valueAsNumber,
  };
}
