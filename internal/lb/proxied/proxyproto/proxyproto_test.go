package proxyproto

import (
	"bytes"
	"net/netip"
	"testing"
)

func FuzzHeader(f *testing.F) {
	a, b := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("[2001:db8::1]:65535")
	for _, h := range [][]byte{Header(1, a, a), Header(2, a, a), Header(1, b, b), Header(2, a, b), []byte("PROXY UNKNOWN\r\n")} {
		f.Add(append(h, "data"...))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		client, at, ok, err := Read(r)
		if err != nil || !ok {
			return
		}
		for version := 1; version <= 2; version++ {
			c, d, ok, err := Read(bytes.NewReader(Header(version, client, at)))
			if err != nil || !ok || c.Addr().Unmap() != client.Addr().Unmap() || d.Port() != at.Port() {
				t.Errorf("v%d of %s %s: %s %s %t %v", version, client, at, c, d, ok, err)
			}
		}
	})
}
