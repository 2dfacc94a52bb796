// Runs before the page is drawn, so that a chosen theme does not flash the other one.
{
  const chosen = localStorage.getItem("lorimer.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
