package connecttime

import (
	"net"
	"os"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
)

// callEnv makes this program a client that connects to an address again and again.
const callEnv = "FAIRLEAD_TEST_CALL"

func TestMain(m *testing.M) {
	if to := os.Getenv(callEnv); to != "" {
		call(to)
	}
	testbed.Main(m)
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
