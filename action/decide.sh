#!/usr/bin/env bash
# Turns the exit code of "spearpp audit" into the result of the job.
set -euo pipefail
case "$CODE" in
  0) exit 0 ;;
  1) echo "::error title=spearpp::Training data can be recovered from this update. The report shows how." ;;
  2) echo "::error title=spearpp::The audit could not start. A file, an option or the model is invalid." ;;
  3)
    if [ "$NOT_APPLICABLE" = pass ]; then
      echo "::warning title=spearpp::No layer of this update can be inverted. Nothing was audited."
      exit 0
    fi
    echo "::error title=spearpp::No layer of this update can be inverted. Nothing was audited."
    ;;
  130) echo "::error title=spearpp::The audit was interrupted." ;;
  *) echo "::error title=spearpp::The audit ended with exit code ${CODE:-unknown}, a defect of spearpp." ;;
esac
exit "${CODE:-4}"
