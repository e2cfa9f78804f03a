"use strict";
// The filter of the page Rosetta: shows the rows that have all words that were typed, opens the modules
// that have such rows, hides the others, and says how many rows are left. Without words, modules are as the
// reader left them.

(() => {
  const input = document.getElementById("mm-filter");
  const count = document.getElementById("mm-filter-count");
  if (!input) return;

  const parts = [...document.querySelectorAll(".mm-rosetta .mm-part, .mm-rosetta.mm-part")];
  const folds = [...document.querySelectorAll(".mm-fold")].map((fold) => ({
    fold, count: fold.querySelector(".mm-fold-count"), words: fold.querySelector(".mm-fold-count").textContent,
  }));
  const rows = [...document.querySelectorAll(".mm-rosetta tbody tr")].map((row) => {
    const fold = row.closest(".mm-fold");
    const module = fold ? fold.querySelector("summary code").textContent : "";
    return { row, text: `${module} ${row.textContent}`.toLowerCase(), more: [...row.querySelectorAll("details")] };
  });
  let leftOpen = null;

  function filter() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let number = 0;
    for (const { row, text, more } of rows) {
      const shows = words.every((word) => text.includes(word));
      row.hidden = !shows;
      number += shows;
      // A word may be among the names that are folded away.
      for (const rest of more) rest.open = shows && words.some((word) => rest.textContent.toLowerCase().includes(word));
    }
    foldModules(words.length > 0);
    for (const table of document.querySelectorAll(".mm-rosetta table")) {
      const box = table.closest(".md-typeset__scrollwrap") || table;
      box.hidden = !table.querySelector("tbody tr:not([hidden])");
    }
    for (const part of parts) part.hidden = !part.querySelector("tbody tr:not([hidden])");
    const values = { n: number, total: rows.length, words: words.join(" ") };
    count.textContent = MM.say(!words.length ? "rosetta.rows" : number ? "rosetta.found" : "rosetta.none", values);
  }

  function foldModules(isFiltered) {
    if (isFiltered) leftOpen ||= new Set(folds.filter(({ fold }) => fold.open).map(({ fold }) => fold));
    for (const { fold, count: shown, words } of folds) {
      const total = fold.querySelectorAll("tbody tr").length;
      const number = fold.querySelectorAll("tbody tr:not([hidden])").length;
      fold.hidden = !number;
      if (isFiltered) fold.open = Boolean(number);
      else if (leftOpen) fold.open = leftOpen.has(fold);
      shown.textContent = isFiltered ? MM.say("rosetta.of", { n: number, total }) : words;
    }
    if (!isFiltered) leftOpen = null;
  }

  // What is looked for stands in the address, so that a link can show it.
  const address = new MM.Address("rosetta", { find: MM.check.words(/^[^<>]{0,100}$/) }, false);
  const readAddress = () => {
    input.value = address.read().values.find ?? input.value;
    filter();
  };
  input.addEventListener("input", () => {
    filter();
    address.write(() => (input.value ? { find: input.value } : {}));
  });
  address.listen(readAddress);
  readAddress(); // A browser may also have kept what was typed before the page was left.
})();
