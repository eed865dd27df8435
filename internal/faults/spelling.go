package faults

// Nearest returns the known word with the smallest difference from word, the first of
// several. It returns "" if all known words differ in more than a third of their letters.
func Nearest(word string, known []string) string {
	nearest, least := "", 0
	for _, k := range known {
		if d := distance(word, k); d <= max(1, len(k)/3) && (nearest == "" || d < least) {
			nearest, least = k, d
		}
	}
	return nearest
}

// Hint returns the end of an error about an unknown word; empty without a near word.
// prefix precedes the near word.
func Hint(prefix, word string, known []string) string {
	if nearest := Nearest(word, known); nearest != "" {
		return "; did you mean " + prefix + nearest + "?"
	}
	return ""
}

// maxWord bounds the work for a word from a peer or a file.
const maxWord = 100

// distance returns the number of letters to add, remove, replace or exchange with their
// neighbour to turn one word into the other.
func distance(a, b string) int {
	if len(a) > maxWord || len(b) > maxWord {
		return maxWord
	}
	beforeLast, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
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
				row[j] = min(row[j], beforeLast[j-2]+1)
			}
		}
		beforeLast, last, row = last, row, beforeLast
	}
	return last[len(b)]
}
