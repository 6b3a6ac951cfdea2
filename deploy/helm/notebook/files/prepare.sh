#!/bin/sh
# Puts the image's notebooks into the folder $1, which is made if need be; what is there already stays.
set -eu
mkdir -p -- "$1"
for file in /opt/maskfleet/notebooks/*.ipynb; do
    [ -e "$1/${file##*/}" ] || cp -- "$file" "$1/"
done
