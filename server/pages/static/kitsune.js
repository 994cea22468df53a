// What makes a page pleasanter where scripts run; every page works without it. Ages count on, answers are dated.
"use strict";

(() => {
  const UNITS = [[90, 1, "s"], [60 * 60, 60, "min"], [48 * 3600, 3600, "h"], [60 * 86400, 86400, "days"]];

  // The clock of the server counts: ages on a machine whose own clock is wrong are right all the same.
  const told = document.querySelector("meta[name=kitsune-now]");
  const ahead = told ? Date.parse(told.content) - Date.now() : 0;
  const now = () => Date.now() + ahead;

  // As `ago` in server/pages/words.py; null where that gives a date.
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

  // Only what can be answered can be asked: a button waits until enough boxes of its form are ticked.
  function countChoices() {
    for (const button of document.querySelectorAll("button[data-least]")) {
      const chosen = [...button.form.elements].filter((one) => one.type === "checkbox" && one.checked);
      button.disabled = chosen.length < Number(button.dataset.least);
    }
  }

  countAges();
  countChoices();
  document.addEventListener("change", countChoices);
  document.addEventListener("htmx:afterSettle", countChoices);
  window.addEventListener("pageshow", countChoices);
  setInterval(countAges, 1000);
  document.addEventListener("htmx:afterRequest", noteAnswer);
})();
