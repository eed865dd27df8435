package origin_test

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/origin"
)

var sensor = origin.Origin{ClientID: "sensor-7", Kind: "auth", ID: "plant", Host: "10.0.0.7", Broker: "b1"}

func TestOriginIsShownWithTheKey(t *testing.T) {
	old, present := []byte("the key of the leader before"), []byte("the key of the leader")
	for _, o := range []origin.Origin{sensor, {Broker: "b2"}, {Broker: "b2", Visits: true, ID: "ü\" ", Kind: "cert"}, {Broker: "b2", Attributes: true}} {
		secret := origin.Secret(present, o.String())
		if !origin.Is([]byte(secret)) {
			t.Errorf("%q is not taken for an origin", secret)
		}
		testkit.MustEqual(t, testkit.Result(origin.Parse([]byte(secret), present, old)).Must(t), o)
		testkit.MustEqual(t, testkit.Result(origin.Parse([]byte(secret), old, present)).Must(t), o)
	}
}

func TestAttributesNeedABrokerThatKnowsThem(t *testing.T) {
	with, without := origin.Origin{ID: "a b", Broker: "b1", Attributes: true}, sensor
	for _, c := range []struct {
		secret, answer string
		want           error
	}{
		{origin.Secret([]byte("key"), with.String()), `{"identity":"a b","attributes":true}`, nil},
		{origin.Secret([]byte("key"), with.String()), `{"identity":"a b"}`, origin.ErrAttributes},
		{origin.Secret([]byte("key"), with.String()), "OK", origin.ErrAttributes},
		{origin.Secret([]byte("key"), without.String()), `{"identity":"plant"}`, nil},
		{"a client's secret", "OK", nil},
	} {
		testkit.Equal(t, origin.CheckAnswer(c.secret, []byte(c.answer)), c.want, c.secret, c.answer)
	}
}

func TestForgedOriginIsRefused(t *testing.T) {
	key := []byte("the key")
	secret := origin.Secret(key, sensor.String())
	for name, forged := range map[string]string{
		"another key":      origin.Secret([]byte("a guess"), sensor.String()),
		"no key":           origin.Secret(nil, sensor.String()),
		"another identity": strings.Replace(secret, "plant", "admin", 1),
		"another MAC":      strings.Replace(secret, "srtm-forward ", "srtm-forward 0", 1),
		"no MAC":           "srtm-forward  " + sensor.String(),
		"cut":              secret[:len(secret)-1],
		"nothing":          "srtm-forward ",
		"a client's":       "a client's secret",
	} {
		for _, keys := range [][][]byte{{key}, {nil}, {}, {key, nil}} {
			if o, err := origin.Parse([]byte(forged), keys...); err == nil || o != (origin.Origin{}) {
				t.Errorf("%s: %+v, %v", name, o, err)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	key := []byte("the key")
	f.Add([]byte(origin.Secret(key, sensor.String())))
	f.Add([]byte(origin.Secret(key, "null")))
	f.Add([]byte("srtm-forward "))
	f.Fuzz(func(t *testing.T, secret []byte) {
		o, err := origin.Parse(secret, key)
		if err != nil && o != (origin.Origin{}) {
			t.Errorf("%q: an error and %+v", secret, o)
		}
		if err == nil && !origin.Is(secret) {
			t.Errorf("%q is taken, and is no origin", secret)
		}
		// For any text in a valid secret, Parse returns the origin in the text, or an error.
		if o, err := origin.Parse([]byte(origin.Secret(key, string(secret))), key); err == nil {
			again, err := origin.Parse([]byte(origin.Secret(key, o.String())), key)
			if err != nil || again != o {
				t.Errorf("%q: %+v, then %+v, %v", secret, o, again, err)
			}
		}
	})
}
