package shareproto

import "slices"

// Enum has what the numbers of an enumeration of the API stand for, by number.
type Enum[Number ~int32, Value comparable] []Value

// Value returns what n stands for; false: it is of a later version.
func (e Enum[Number, Value]) Value(n Number) (v Value, known bool) {
	if n < 0 || int(n) >= len(e) {
		return v, false
	}
	return e[n], true
}

// Number returns the last that stands for v; 0 where none does.
func (e Enum[Number, Value]) Number(v Value) Number {
	for n, one := range slices.Backward(e) {
		if one == v {
			return Number(n)
		}
	}
	return 0
}
