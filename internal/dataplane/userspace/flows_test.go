package userspace

import (
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/fairlead/fairlead/internal/testbed/questions"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func create(t testing.TB, _ *testbed.Host) dataplane.Applier {
	t.Helper()
	return open(t, Config{})
}

// withoutFailover is for tests in which every endpoint answers, however slow the
// machine is: a late answer is not a dead endpoint.
func withoutFailover(t testing.TB, _ *testbed.Host) dataplane.Applier {
	t.Helper()
	return open(t, Config{ConnectTimeout: time.Minute})
}

func open(t testing.TB, c Config) *Mode {
	t.Helper()
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestFlows(t *testing.T) { flows.Run(t, "userspace", withoutFailover) }

func TestStories(t *testing.T) { flows.Stories(t, withoutFailover, flows.Relayed) }

func TestExplanations(t *testing.T) { questions.Run(t, "userspace", withoutFailover) }

func TestLostPacketsAreCounted(t *testing.T) { flows.Counts(t, withoutFailover) }
