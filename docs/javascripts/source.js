"use strict";
// A page of annotated source: the line or symbol that the address names is in the middle of the screen,
// also where it stands in a fold. The stylesheet does it at first; this does it again when the page is whole,
// and opens what is folded before the page is printed. Without JavaScript the browser opens the fold.

(() => {
  function show() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    // Where the element itself is empty, an id at a line, the line counts.
    (target.closest(".mm-line") ?? target).scrollIntoView({ block: "center", inline: "nearest", behavior: "instant" });
  }

  show();
  addEventListener("load", show);
  addEventListener("hashchange", show);
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll(".mm-imports")) fold.open = true;
  });
})();
