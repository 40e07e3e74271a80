"use strict";

// Numbers as a person reads them, and elements that hold text and never markup.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytes(value) {
  let size = Math.abs(value), unit = 0;
  while (size >= 1024 && unit < BYTE_UNITS.length - 1) { size /= 1024; unit += 1; }
  const digits = unit === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2;
  const text = size.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return `${value < 0 ? "−" : ""}${text} ${BYTE_UNITS[unit]}`;
}

function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(value * 1e3).toFixed(size < 0.1 ? 1 : 0)} ms`;
  return `${value.toFixed(size < 100 ? 2 : 0)} s`;
}

const UNITS = {
  bytes,
  seconds,
  ratio: (value) => `${value.toFixed(2)} ×`,
  share: (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`,
  count: (value) => Math.round(value).toLocaleString("en"),
  text: (value) => String(value),
};

function shown(value, unit) {
  if (value === null || value === undefined) return "";
  return typeof value === "number" && UNITS[unit] ? UNITS[unit](value) : String(value);
}

// element("p", {class: "note"}, "text", child, ...): strings become text nodes.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// Code with a button that copies it, where the browser lets a file do so.
function copyable(code) {
  const box = element("code", {}, code);
  const button = element("button", { type: "button", class: "copy", "aria-label": `Copy: ${code}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(box);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return element("div", { class: "code" }, box, button);
}
