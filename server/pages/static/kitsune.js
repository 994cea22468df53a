// What makes a page pleasanter where scripts run; every page works without it. Ages count on, answers are dated, code
// is copied, and what was typed is kept.
"use strict";

(() => {
  const UNITS = [[90, 1, "s"], [60 * 60, 60, "min"], [48 * 3600, 3600, "h"], [60 * 86400, 86400, "days"]];

  // The clock of the server counts: ages on a machine whose own clock is wrong are right all the same.
  const told = document.querySelector("meta[name=kitsune-now]");
  const ahead = told ? Date.parse(told.content) - Date.now() : 0;
  const now = () => Date.now() + ahead;

  // As `ago` in server/charts/drawing/words.py; null where that gives a date.
  function ago(seconds) {
    if (seconds < 1) return "just now";
    const unit = UNITS.find(([most]) => seconds < most);
    return unit ? `${Math.trunc(seconds / unit[1])}\u00a0${unit[2]} ago` : null;
  }

  function countAges() {
    for (const element of document.querySelectorAll("time[data-ago]")) {
      const text = ago((now() - Date.parse(element.dateTime)) / 1000);
      if (text && text !== element.textContent) element.textContent = text;
    }
  }

  // An answer of the server that it is all as before is news too; when none comes, the age says so.
  function noteAnswer(event) {
    if (!event.detail.successful) return;
    for (const element of document.querySelectorAll("time[data-updated]")) {
      element.dateTime = new Date(now()).toISOString();
      element.removeAttribute("title");
    }
    countAges();
  }

  // Only what can be answered can be asked: a button waits until enough boxes of its form are ticked, and not too many.
  function countChoices() {
    for (const button of document.querySelectorAll("button[data-least]")) {
      const chosen = [...button.form.elements].filter((one) => one.type === "checkbox" && one.checked);
      button.disabled = chosen.length < Number(button.dataset.least) || chosen.length > Number(button.dataset.most);
    }
  }

  // In a region that stays: what comes with its text is announced by few readers of screens.
  function announce(text) {
    const region = document.getElementById("announced");
    if (region.textContent !== text) region.textContent = text;
  }

  function announceNews() {
    const told = document.querySelector("[data-announced]");
    if (told) announce(told.textContent);
  }

  function isTyped(field) {
    if (field.type === "hidden" || field.type === "submit") return false;
    if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
    return "defaultValue" in field && field.value !== field.defaultValue;
  }

  // Where something is typed, a page that would load itself anew says so instead.
  function keepTyped(event) {
    if (!event.detail.xhr.getResponseHeader("hx-refresh")) return;
    const notice = document.getElementById("outdated");
    const fields = [...document.forms].flatMap((form) => [...form.elements]);
    if (!notice || !fields.some(isTyped)) return;
    event.preventDefault();
    notice.hidden = false;
    announce(notice.textContent);
  }

  // Without https, but on this very machine, browsers have no clipboard: there the selection is copied.
  async function copy(code) {
    if (navigator.clipboard) return navigator.clipboard.writeText(code.textContent);
    getSelection().selectAllChildren(code);
    const isDone = document.execCommand("copy");
    getSelection().removeAllRanges();
    if (!isDone) throw new Error("the browser refuses");
  }

  function offerCopies() {
    for (const code of document.querySelectorAll("pre > code")) {
      const box = code.parentElement;
      if (box.parentElement.classList.contains("copied")) continue;
      const around = document.createElement("div");
      around.className = "copied";
      box.replaceWith(around);
      const button = document.createElement("button");
      button.type = "button";
      button.className = "second copy";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        button.textContent = await copy(code).then(() => "Copied", () => "Select it instead");
        announce(button.textContent);
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      });
      around.append(box, button);
    }
  }

  for (const element of document.querySelectorAll("[data-scripted]")) element.hidden = false;
  offerCopies();
  document.addEventListener("htmx:afterSettle", offerCopies);
  document.addEventListener("htmx:afterSettle", announceNews);
  document.addEventListener("htmx:beforeOnLoad", keepTyped);
  countAges();
  countChoices();
  document.addEventListener("change", countChoices);
  document.addEventListener("htmx:afterSettle", countChoices);
  window.addEventListener("pageshow", countChoices);
  setInterval(countAges, 1000);
  document.addEventListener("htmx:afterRequest", noteAnswer);
})();
