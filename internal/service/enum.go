package service

import "slices"

// Enum maps the numbers of an API enumeration to values, by number.
type Enum[Number ~int32, Value comparable] []Value

// Value returns the value of n; false if n is from a later version.
func (e Enum[Number, Value]) Value(n Number) (v Value, found bool) {
	if n < 0 || int(n) >= len(e) {
		return v, false
	}
	return e[n], true
}

// Number returns the last number of v; 0 without one.
func (e Enum[Number, Value]) Number(v Value) Number {
	for n, candidate := range slices.Backward(e) {
		if candidate == v {
			return Number(n)
		}
	}
	return 0
}
