package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// Each request has the PROXY protocol's header of its own client.
func TestHTTPWithProxyProtocol(t *testing.T) {
	r := newRig(t, map[string]string{
		lbProtocol: "http", "fairlead.dev/lb-proxy-protocol": "v1", "fairlead.dev/lb-trusted-fronts": "127.0.0.0/8",
	})
	r.set(r.Pod(func(c net.Conn) {
		in := bufio.NewReader(c)
		line, _ := in.ReadString('\n')
		if _, err := http.ReadRequest(in); err == nil {
			_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(line), line)
		}
		_, _ = io.Copy(io.Discard, c)
	}))
	for _, client := range []string{"192.0.2.1 198.51.100.1 1000 80", "192.0.2.2 198.51.100.1 2000 80"} {
		c := r.Dial()
		for range 2 {
			if client != "" {
				_, _ = io.WriteString(c, "PROXY TCP4 "+client+"\r\n")
			}
			_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
			r.Must(err)
			answer, err := http.ReadResponse(bufio.NewReader(c), nil)
			r.Must(err)
			if got, _ := io.ReadAll(answer.Body); !strings.HasPrefix(string(got), "PROXY TCP4 192.0.2.") ||
				client != "" && string(got) != "PROXY TCP4 "+client+"\r\n" {
				t.Errorf("%q", got)
			}
			client = ""
		}
	}
}
