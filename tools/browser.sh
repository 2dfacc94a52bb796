#!/bin/sh
# Installs Debian's chromium for the tests of the console, where it is missing and can be installed: by root, with apt-get.
# Without a browser those tests are skipped with a reason, so this never fails.
command -v chromium > /dev/null || command -v chromium-browser > /dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0
echo "installing chromium for the tests of the console"
export DEBIAN_FRONTEND=noninteractive
quickly="-o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60"
# shellcheck disable=SC2086 # the options are words
{ apt-get $quickly update && apt-get $quickly install --yes --no-install-recommends chromium; } > /dev/null 2>&1
exit 0
