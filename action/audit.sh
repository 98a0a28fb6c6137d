#!/usr/bin/env bash
# Runs one audit for action.yml. The inputs of the action are environment variables.
# The script writes the outputs "exit-code" and "verdict", and succeeds whatever the verdict is, so that the action can
# upload the report before decide.sh fails the job.
set -uo pipefail

# A folder of an earlier step must not be taken for the result of this audit.
rm -f "$OUT/report.json" "$OUT/report.sarif" "$OUT/report.junit.xml"

command=(spearpp audit --model "$MODEL" --kind "$KIND" --budget "$BUDGET" --fail-on "$FAIL_ON" --redact "$REDACT" --out "$OUT")
[ -z "$BATCH_SIZE" ] || command+=(--batch-size "$BATCH_SIZE")
[ -z "$ROUNDS" ] || command+=(--rounds "$ROUNDS")
read -r -a more <<<"${ARGS//$'\n'/ }"
command+=(${more[@]+"${more[@]}"} --)  # an empty list is an error in old versions of bash
[ -z "$UPDATE" ] || command+=("$UPDATE")
[ -z "$AFTER" ] || command+=("$AFTER")

"${command[@]}"
code=$?

field() {  # prints one field of report.json, or nothing if there is no report
  python -c 'import json, sys; print(json.load(open(sys.argv[1], encoding="utf-8"))[sys.argv[2]])' "$OUT/report.json" "$1" 2>/dev/null
}
{
  echo "exit-code=$code"
  echo "verdict=$(field verdict)"
} >>"$GITHUB_OUTPUT"
if [ -f "$OUT/report.json" ]; then
  {
    echo "### spearpp: $(field verdict)"
    echo
    echo '```text'
    field summary | tr -d '`'
    echo '```'
    echo
    echo "No verdict means that an update is safe."
  } >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
fi
exit 0
