// Package a imports downwards.
package a

import _ "fixture.test/m/lower/x"
