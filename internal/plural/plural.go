// Package plural writes counts with their nouns, for people.
package plural

import (
	"fmt"
	"strings"
)

// Count writes a count with its noun: "1 broker", "2 brokers".
func Count[N ~int | ~int32 | ~int64 | ~uint | ~uint32 | ~uint64](n N, noun string) string {
	return fmt.Sprint(n, " ", Noun(n, noun))
}

// Noun returns the form of the noun that follows the count n.
func Noun[N ~int | ~int32 | ~int64 | ~uint | ~uint32 | ~uint64](n N, noun string) string {
	switch stem, y := strings.CutSuffix(noun, "y"); {
	case n == 1:
		return noun
	case y && !strings.ContainsAny(stem[max(0, len(stem)-1):], "aeiou"): // delivery, but key, gateway
		return stem + "ies"
	case strings.HasSuffix(noun, "s"):
		return noun + "es"
	}
	return noun + "s"
}
