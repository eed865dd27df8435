package names

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/srtm-io/srtm/nsq/wire"
)

// hashLength is the number of hexadecimal digits of a hash in a channel name.
const hashLength = 16

// ChannelPrefix begins the name of each channel that ClientChannel returns.
const ChannelPrefix = "mqtt."

// ClientChannel returns the channel of a client's subscriptions that are not shared: mqtt.CLIENTID, or a
// hash instead of a client id that cannot be part of a channel name. An ephemeral channel ends with the
// client's connection.
func ClientChannel(clientID string, ephemeral bool) string {
	suffix := ""
	if ephemeral {
		suffix = "#ephemeral"
	}
	channel := ChannelPrefix + clientID + suffix
	// A client id in the form of a hash might be the hash of another client id.
	if hashed := len(clientID) == hashLength+1 && clientID[0] == '_'; hashed || strings.Contains(clientID, "#") || !wire.ValidChannelName(channel) {
		return ChannelPrefix + "_" + hash(clientID) + suffix
	}
	return channel
}

// SharedChannel returns the channel of $share/SHARE/FILTER on the filter's topics: SHARE if the filter
// selects all messages of the topics, otherwise SHARE with a suffix for the filter. So the consumers of a
// channel want the same messages. Requires: share is a valid channel name.
func (r *Rules) SharedChannel(share, filter string, topics []string) string {
	if r.Complete(filter, topics) {
		return share
	}
	suffix := "._" + hash(filter)
	if len(share)+len(suffix) > wire.MaxNameLength {
		suffix = "._" + hash(share+"/"+filter)
		share = share[:wire.MaxNameLength-len(suffix)]
	}
	return share + suffix
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:hashLength/2])
}
