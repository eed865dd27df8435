package wire

// MaxNameLength is the maximum length of a topic or channel name in bytes, including the suffix.
const MaxNameLength = 64

// ephemeralSuffix marks a topic or channel that is never stored on disk and ends with its last
// client.
const ephemeralSuffix = "#ephemeral"

// The characters of a name, one bit per ASCII code: nameLow holds the codes 0 to 63, nameHigh 64 to
// 127.
const (
	nameLow  uint64 = 1<<'-' | 1<<'.' | (1<<10-1)<<'0'
	nameHigh uint64 = (1<<26-1)<<('A'-64) | 1<<('_'-64) | (1<<26-1)<<('a'-64)
)

// ValidTopicName reports whether name is 1 to 64 characters of [.a-zA-Z0-9_-], optionally ending in
// the suffix "#ephemeral". The suffix alone is not a name.
func ValidTopicName[T ~string | ~[]byte](name T) bool { return validName(name) }

// ValidChannelName applies the same rule to channels.
func ValidChannelName[T ~string | ~[]byte](name T) bool { return validName(name) }

func validName[T ~string | ~[]byte](name T) bool {
	n := len(name)
	if n > MaxNameLength {
		return false
	}
	if Ephemeral(name) {
		n -= len(ephemeralSuffix)
	}
	for i := range n {
		c := name[i]
		set := nameLow
		if c >= 64 {
			set = nameHigh
		}
		if c >= 128 || set>>(c&63)&1 == 0 {
			return false
		}
	}
	return n > 0
}

// Ephemeral reports whether name ends in "#ephemeral". It does not check the rest.
func Ephemeral[T ~string | ~[]byte](name T) bool {
	at := len(name) - len(ephemeralSuffix)
	return at >= 0 && string(name[at:]) == ephemeralSuffix
}
