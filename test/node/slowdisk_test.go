package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// slowTime is how long the disk is slow at most: less than the 40 s in which the Node's Lease has to be renewed.
const slowTime = 20 * time.Second

// manyWrites are more than a disk whose syncs take a second takes within testbed.Patience.
const manyWrites = 100

// Each fsync of the server takes a second longer for a while: writes are slow, none that was acknowledged is lost, no
// Node is condemned, connections to Services are answered, the log and a metric tell, and all is fast again without a restart.
func TestSlowDisk(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	at := c.backends()
	const ready = `jsonpath={range .items[*].status.conditions[?(@.type=="Ready")]}{.status} {.lastTransitionTime}{end}`
	before := c.kubectl("get", "nodes", "-o", ready)
	traffic := c.connect(20*time.Millisecond, target{c.node, svc.TCP, at})
	w := startWriter(t, c)
	testbed.Until(t, "a write", w.writes())

	end := process.SlowDisk(t, c.api.Process, time.Second)
	written, since := w.count(), time.Now()
	c.api.Says("the disk is slow: writes wait for it")
	testbed.Until(t, "three writes to a slow disk", func() error {
		if n := w.count() - written; n < 3 && time.Since(since) < slowTime {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	slow := time.Since(since)
	end()
	t.Logf("%d writes in %s to a slow disk; the controllers have lost their Lease %d times",
		w.count()-written, slow, strings.Count(c.api.Log(), "no longer the leader"))
	fast := w.count()
	testbed.Until(t, "writes that wait for no slow disk", func() error {
		if n := w.count() - fast; n < manyWrites {
			return fmt.Errorf("%d of %d", n, manyWrites)
		}
		return nil
	})
	acknowledged := w.stop()
	traffic.cancel()
	traffic.wg.Wait()

	if len(traffic.lost) > 0 {
		t.Errorf("%d of %d connections were lost: %v", len(traffic.lost), traffic.made, traffic.lost)
	}
	if after := c.kubectl("get", "nodes", "-o", ready); after != before {
		t.Errorf("the Node was %s and is %s", before, after)
	}
	metrics := c.kubectl("get", "--raw", "/metrics")
	if !strings.Contains(metrics, "\nfairlead_etcd_slow_syncs_total ") || strings.Contains(metrics, "\nfairlead_etcd_slow_syncs_total 0\n") {
		t.Error("/metrics tells of no slow sync")
	}
	c.holds(acknowledged)
}
