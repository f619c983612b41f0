// Draws at most once a frame: the playground's answer, and the rest after each event.

let isScheduled = false;
let isStale = false;

function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    drawAnswer();
    if (!isStale) return;
    isStale = false;
    describeMode();
    drawCharts();
    drawCluster();
    drawRows();
  });
}

function render() {
  isStale = true;
  schedule();
}

follow();
