// Package origin names the publisher for whom a broker publishes. A broker that forwards its
// clients' publishes sends the origin to the target broker as the secret of AUTH:
//
//	srtm-forward MAC JSON
//
// JSON is the Origin. MAC is the HMAC-SHA-256 of JSON in hexadecimal. Only brokers get its key,
// from the loaddistributor, so a client cannot forge an origin. AUTH follows TLS, so an origin is
// as secret in transit as the secrets of clients. The package knows nothing of brokers.
package origin

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
)

// Origin is a publisher as its own broker knows it. Origins are comparable.
type Origin struct {
	ClientID string `json:"client_id,omitempty"` // from IDENTIFY
	// Kind and ID are the publisher's identity: an AUTH identity, a certificate's name, a client_id
	// or an address.
	Kind string `json:"kind,omitempty"`
	ID   string `json:"id,omitempty"`
	Host string `json:"host,omitempty"` // the publisher's address
	// Broker is the id of the forwarding broker.
	Broker string `json:"broker"`
	// Visits means that the publisher has no connection, and each message is a separate request.
	Visits bool `json:"visits,omitempty"`
	// Attributes means that the body of each message on the connection, in both directions, begins
	// with the message's attribute (wire.AppendAttribute).
	Attributes bool `json:"attributes,omitempty"`
}

// Answer is the answer to AUTH with an origin, as JSON.
type Answer struct {
	Identity string `json:"identity"` // Origin.ID
	// Attributes confirms Origin.Attributes. Releases before attributes do not confirm, and would
	// take an attribute for a part of its message.
	Attributes bool `json:"attributes,omitempty"`
}

const prefix = "srtm-forward "

// Errors of Parse.
var (
	errForm   = errors.New("not of the form srtm-forward MAC JSON")
	errForged = errors.New("the MAC is of no broker of this cluster")
)

// ErrAttributes: the broker is of a release without attributes.
var ErrAttributes = errors.New("the broker does not know attributes of messages, which MQTT needs: upgrade the broker")

// String returns o as JSON, for Secret.
func (o Origin) String() string {
	text, _ := json.Marshal(o) // strings and a bool always encode
	return string(text)
}

// Of parses the result of String. For any other text it returns the zero Origin.
func Of(text string) (o Origin) {
	if json.Unmarshal([]byte(text), &o) != nil {
		return Origin{}
	}
	return o
}

// Secret returns the secret of AUTH for an Origin's String.
func Secret(key []byte, origin string) string {
	return prefix + hex.EncodeToString(mac(key, []byte(origin))) + " " + origin
}

// Is reports whether a secret of AUTH has the form of an origin. The secret may be forged.
func Is(secret []byte) bool { return bytes.HasPrefix(secret, []byte(prefix)) }

// CheckAnswer returns ErrAttributes if the secret's origin has Attributes and the answer to AUTH
// does not confirm them.
func CheckAnswer(secret string, answer []byte) error {
	rest, _ := strings.CutPrefix(secret, prefix)
	_, text, _ := strings.Cut(rest, " ")
	var a Answer
	if !Is([]byte(secret)) || !Of(text).Attributes || json.Unmarshal(answer, &a) == nil && a.Attributes {
		return nil
	}
	return ErrAttributes
}

// Parse returns the origin in a secret that was made with one of the keys.
func Parse(secret []byte, keys ...[]byte) (Origin, error) {
	rest, is := bytes.CutPrefix(secret, []byte(prefix))
	proof, text, found := bytes.Cut(rest, []byte(" "))
	sum := make([]byte, sha256.Size)
	if !is || !found || len(proof) != hex.EncodedLen(len(sum)) {
		return Origin{}, errForm
	}
	if _, err := hex.Decode(sum, proof); err != nil {
		return Origin{}, errForm
	}
	for _, key := range keys {
		if len(key) == 0 || !hmac.Equal(sum, mac(key, text)) {
			continue
		}
		var o Origin
		if err := json.Unmarshal(text, &o); err != nil {
			return Origin{}, errForm
		}
		return o, nil
	}
	return Origin{}, errForged
}

func mac(key, text []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(text)
	return h.Sum(nil)
}
