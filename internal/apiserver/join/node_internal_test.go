package join

import (
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/transport"

	"github.com/fairlead/fairlead/internal/loop"
)

// After a renewal connections with the certificate before may be open until clients have looked for a new one. The end of that is
// told, so that the node reports its new certificate then.
func TestReplacing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{changed: loop.NewSignal()}
		told := func() bool {
			select {
			case <-n.Changed():
				return true
			default:
				return false
			}
		}
		if n.Replacing() || n.settle() != maxPause || told() {
			t.Error("a node without a renewal replaces its certificate")
		}
		n.replaced()
		if !n.Replacing() || !told() {
			t.Error("a renewal is not told")
		}
		wait := n.settle()
		if wait <= transport.CertCallbackRefreshDuration || !n.Replacing() || told() {
			t.Errorf("the connections of before are taken for closed after %s", wait)
		}
		time.Sleep(wait)
		if n.settle() != maxPause || n.Replacing() || !told() {
			t.Error("the end of the connections is not told")
		}
		if n.settle(); told() {
			t.Error("it is told twice")
		}
	})
}
