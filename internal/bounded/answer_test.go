package bounded

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestRead(t *testing.T) {
	for text, most := range map[string]int64{"": 0, "abc": 3} {
		got, err := Read(strings.NewReader(text), most)
		testkit.NoError(t, err, "%q", text)
		testkit.Equal(t, string(got), text)
	}
	_, err := Read(strings.NewReader("abcd"), 3)
	testkit.ErrorHas(t, err, "more than 3 bytes")
}

func TestDecode(t *testing.T) {
	testkit.Equal(t, elements([]byte(`{"a":1,"topics":[{"b":"[,{\"","c":[1,2,3]},{"d":[]}],"e":{"f":null}}`)), 6, "elements: 5, and the list of none")
	var into struct{ A []struct{} }
	testkit.NoError(t, Decode([]byte(`{"a":[{},{}]}`), 4, &into))
	testkit.Equal(t, len(into.A), 2)
	testkit.ErrorIs(t, Decode([]byte(`{"a":[{},{}]}`), 3, &into), ErrElements)
	testkit.ErrorHas(t, Decode([]byte(strings.Repeat(`[`, 20_000)+strings.Repeat(`]`, 20_000)), 1<<20, &into), "depth")
}
