package agent

import "testing"

func FuzzParseBase(f *testing.F) {
	f.Add([]byte(`{"version":1,"topic":"t","epoch":7,"rate_milli":5,"burst":2}`))
	f.Add([]byte(`{"version":1,"topic":"","epoch":18446744073709551615,"rate_milli":-9223372036854775808,"burst":1e9}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := parseBase(data)
		if err == nil && (b.Topic == "" || b.Epoch == 0 || b.Share.IsZero() || b.Share.Validate() != nil) {
			t.Errorf("%q is taken as %+v", data, b)
		}
		if err != nil && b != (Base{}) {
			t.Errorf("%q: %v, and %+v", data, err, b)
		}
	})
}
