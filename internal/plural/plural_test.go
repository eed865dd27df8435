package plural

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestNounFollowsItsCount(t *testing.T) {
	for _, noun := range [][2]string{{"topic", "topics"}, {"key", "keys"}, {"gateway", "gateways"}, {"delivery", "deliveries"}, {"class", "classes"}} {
		testkit.Equal(t, Count(1, noun[0]), "1 "+noun[0])
		testkit.Equal(t, Count(uint64(0), noun[0]), "0 "+noun[1])
		testkit.Equal(t, Count(int64(12), noun[0]), "12 "+noun[1])
	}
}
