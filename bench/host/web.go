package host

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

var client = http.Client{Timeout: 5 * time.Second}

// Depth is how many messages of a topic a broker holds; 0 before the first is published.
func Depth(ctx context.Context, web, topic string) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+web+"/stats?format=json&include_clients=false&topic="+topic, nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var stats struct{ Topics []struct{ Depth int64 } }
	if err := json.NewDecoder(resp.Body).Decode(&stats); err != nil {
		return 0, fmt.Errorf("/stats of %s: %w", web, err)
	}
	if len(stats.Topics) == 0 {
		return 0, nil
	}
	return stats.Topics[0].Depth, nil
}
