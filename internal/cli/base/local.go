package base

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
)

// maxAnswer bounds an answer of this machine, in bytes.
const maxAnswer = 32 << 20

// GetLocal asks this machine at an address to listen on.
func GetLocal(ctx context.Context, bind, path string) (code int, body []byte, err error) {
	host, port, err := net.SplitHostPort(bind)
	if err != nil {
		return 0, nil, err
	}
	if a, err := netip.ParseAddr(host); host == "" || err == nil && a == netip.IPv4Unspecified() {
		host = "127.0.0.1"
	} else if err == nil && a == netip.IPv6Unspecified() {
		host = "::1"
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+path, http.NoBody)
	if err != nil {
		return 0, nil, err
	}
	// Without a proxy of the environment: this is this machine.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(q)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(io.LimitReader(answer.Body, maxAnswer+1))
	if err == nil && len(body) > maxAnswer {
		return answer.StatusCode, nil, fmt.Errorf("its answer is longer than %d MiB", maxAnswer>>20)
	}
	return answer.StatusCode, body, err
}
