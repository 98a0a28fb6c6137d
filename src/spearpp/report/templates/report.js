(function () {
  "use strict";
  var cards = document.getElementById("cards");
  if (!cards) { return; }
  var place = cards.tBodies ? cards.tBodies[0] : cards;
  var samples = Array.prototype.slice.call(place.querySelectorAll(".sample"));
  var filter = document.getElementById("filter"), label = document.getElementById("label");
  var sort = document.getElementById("sort"), count = document.getElementById("count");
  function value(sample, name) { var text = sample.dataset[name]; return text === "" ? NaN : Number(text); }
  var orders = {
    number: function (a, b) { return value(a, "number") - value(b, "number"); },
    label: function (a, b) { return compare(value(a, "label"), value(b, "label")); },
    psnr: function (a, b) { return compare(value(a, "psnr"), value(b, "psnr")); },
    error: function (a, b) { return compare(value(b, "error"), value(a, "error")); }
  };
  function compare(a, b) { return isNaN(a) ? (isNaN(b) ? 0 : 1) : isNaN(b) ? -1 : a - b; }
  function show() {
    var shown = 0;
    samples.slice().sort(function (a, b) { return orders[sort.value](a, b) || orders.number(a, b); })
      .forEach(function (sample) { place.appendChild(sample); });
    samples.forEach(function (sample) {
      var kept = (!filter.value || sample.dataset.state === filter.value) &&
        (!label || !label.value || sample.dataset.label === label.value);
      sample.hidden = !kept;
      shown += kept ? 1 : 0;
    });
    count.textContent = shown + " shown";
  }
  [filter, label, sort].forEach(function (control) { if (control) { control.addEventListener("change", show); } });
  show();
})();
