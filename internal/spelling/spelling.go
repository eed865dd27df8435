// Package spelling finds the word that a mistyped one was meant to be, for the errors of
// command lines and configuration files. It knows neither.
package spelling

// Nearest returns the known word that differs least from word: the first of several, and
// nothing if all of them differ in more than a third of their letters.
func Nearest(word string, known []string) string {
	nearest, least := "", 0
	for _, k := range known {
		if d := distance(word, k); d <= max(1, len(k)/3) && (nearest == "" || d < least) {
			nearest, least = k, d
		}
	}
	return nearest
}

// Hint continues an error about an unknown word, and is empty without a near one. The
// prefix is written before the near word.
func Hint(prefix, word string, known []string) string {
	if near := Nearest(word, known); near != "" {
		return "; did you mean " + prefix + near + "?"
	}
	return ""
}

// maxWord bounds the work for a word that a peer or a file gives.
const maxWord = 100

// distance returns how many letters must be added, removed, replaced or exchanged with
// their neighbour to make one word the other.
func distance(a, b string) int {
	if len(a) > maxWord || len(b) > maxWord {
		return maxWord
	}
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			replaced := last[j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			row[j] = min(last[j]+1, row[j-1]+1, replaced)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
