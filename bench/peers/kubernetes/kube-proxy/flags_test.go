package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"k8s.io/component-base/logs"
	"k8s.io/kubernetes/cmd/kube-proxy/app"
)

// list has each flag of kube-proxy with its default, in order. 'fairlead proxy' is tested to take every one of them.
const list = "../../../../internal/cli/kubeproxy/testdata/flags.txt"

// The list is that of the real program, so that a new version cannot bring a flag that fairlead does not know.
// UPDATE=1 writes it.
func TestFlags(t *testing.T) {
	cmd := app.NewProxyCommand()
	logs.AddFlags(cmd.PersistentFlags()) // as k8s.io/component-base/cli does
	var got strings.Builder
	add := func(f *pflag.Flag) {
		if !strings.HasPrefix(f.Name, "test.") { // flags of this test
			fmt.Fprintf(&got, "%s %q\n", f.Name, f.DefValue)
		}
	}
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	all.AddFlagSet(cmd.Flags())
	all.AddFlagSet(cmd.PersistentFlags())
	all.AddFlagSet(pflag.CommandLine) // cobra adds it: --version
	all.SortFlags = true
	all.VisitAll(add)
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(list, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("the flags of kube-proxy are\n%s\n%s has\n%s", got.String(), list, want)
	}
}
