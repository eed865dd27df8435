#!/bin/sh
# Fetches the scripts and styles of others that the console embeds again, by version and hash, with
# their licences, from the npm registry: make console-assets.
set -eu
cd "$(dirname "$0")/assets"
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# fetch PACKAGE VERSION SHA512 FILE... puts files of a package here, and its licence.
fetch() {
    package=$1 version=$2 hash=$3
    shift 3
    archive=$dir/$(npm pack --silent --pack-destination "$dir" "$package@$version")
    [ "$(openssl dgst -sha512 -binary "$archive" | base64 -w 0)" = "$hash" ] || { echo "$package@$version is not what it was" >&2; exit 1; }
    rm -rf "$dir/package"
    tar -xzf "$archive" -C "$dir"
    for file; do cp "$dir/package/$file" .; done
    cp "$dir"/package/LICENSE* "$(basename "$1" | cut -d. -f1).LICENSE"
}

fetch htmx.org 4.0.1 oF7JgXhDW9UXCy/k1ZYFUQgzu/rm19ORWPSPNL91vPluB2PB9+MV55tyQdH/w7o2EAbTYUG5SDW1R60mdkdqGg== dist/htmx.min.js
fetch uplot 1.6.32 KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw== dist/uPlot.iife.min.js dist/uPlot.min.css
fetch @picocss/pico 2.1.1 kIDugA7Ps4U+2BHxiNHmvgPIQDWPDU4IeU6TNRdvXQM1uZX+FibqDQT2xUOnnO2yq/LUHcwnGlu1hvf4KfXnMg== css/pico.min.css
