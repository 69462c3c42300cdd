package registration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// What a drain has deleted comes back when the node is uncordoned, and not before.
func TestDirectoryOfACordonedNode(t *testing.T) {
	client := kubernetes.NewForConfigOrDie(process.API(t))
	pods, nodes := client.CoreV1().Pods("default"), client.CoreV1().Nodes()
	dir, log := filepath.Join(t.TempDir(), "services.d"), &lines{}
	node, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cordoned"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(dir+"/a.yaml", []byte("name: drained\nports: [\"80\"]\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	d := &registration.Directory{Path: dir, Node: node.Name, Client: client, Log: slog.New(slog.NewTextHandler(log, nil))}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
	}()
	there := func() error {
		_, err := pods.Get(t.Context(), "drained-cordoned", metav1.GetOptions{})
		return err
	}
	testbed.Until(t, "the registration", there)
	cordon := func(on bool) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"spec":{"unschedulable":%v}}`, on)
		if _, err := nodes.Patch(t.Context(), node.Name, "application/merge-patch+json", patch, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	cordon(true)
	if err := pods.Delete(t.Context(), "drained-cordoned", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "the line in the log", func() error {
		if !strings.Contains(log.String(), "node cordoned is cordoned: it is registered after 'kubectl uncordon cordoned'") {
			return errors.New(log.String())
		}
		return nil
	})
	if err := there(); err == nil {
		t.Error("it is registered on the cordoned node")
	}
	cordon(false)
	testbed.Until(t, "the registration again", there)
}
