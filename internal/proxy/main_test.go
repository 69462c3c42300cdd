package proxy

import (
	"flag"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
)

// The modes of TestSoak, the only tests here that run side by side, wait more
// than they work: on a machine of two processors, too, one minute is enough for
// all of them.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	testbed.Main(m)
}
