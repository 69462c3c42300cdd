package connecttime

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
)

// callEnv makes this program a client that connects to an address again and again, askEnv one that sends datagrams to it
// from one connected socket as long as that goes.
const (
	callEnv = "FAIRLEAD_TEST_CALL"
	askEnv  = "FAIRLEAD_TEST_ASK"
)

func TestMain(m *testing.M) {
	if to := os.Getenv(callEnv); to != "" {
		call(to)
	}
	if to := os.Getenv(askEnv); to != "" {
		resolve(to)
	}
	testbed.Main(m)
}

// resolve asks until the process is ended, as a resolver does that keeps its socket. It writes a line for each answer, and for
// each socket's end, with the time of the question at its end.
func resolve(to string) {
	var c net.Conn
	for buf := make([]byte, 256); ; <-time.After(20 * time.Millisecond) {
		var err error
		if c == nil {
			if c, err = net.Dial("udp", to); err != nil {
				continue
			}
		}
		asked := time.Now()
		_ = c.SetDeadline(asked.Add(time.Second))
		n := 0
		if _, err = c.Write([]byte("?\n")); err == nil {
			n, err = c.Read(buf)
		}
		switch {
		case err == nil:
			fmt.Println(strings.TrimSpace(string(buf[:n])), asked.UnixNano())
		case !errors.Is(err, os.ErrDeadlineExceeded):
			fmt.Println("ended", err, asked.UnixNano())
			_ = c.Close()
			c = nil
		}
	}
}

// call connects until the process is ended.
func call(to string) {
	for {
		if c, err := net.DialTimeout("tcp", to, time.Second); err == nil {
			_ = c.Close()
		}
		<-time.After(20 * time.Millisecond)
	}
}
