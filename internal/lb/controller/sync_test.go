package controller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// An Event about a failure shows what concerns the Service, in bounded plain text, and nothing of the cluster.
func TestSyncProblem(t *testing.T) {
	resource := schema.GroupResource{Group: "fairlead.dev", Resource: "addressclaims"}
	address := &net.TCPAddr{IP: net.IPv4(10, 9, 8, 7), Port: 6443}
	refused := &net.OpError{Op: "dial", Net: "tcp", Addr: address, Err: errors.New("connection refused")}
	long := field.ErrorList{field.Invalid(field.NewPath("spec"), strings.Repeat("x\n", 5000), "is wrong")}
	for _, c := range []struct {
		err  error
		want string
	}{
		{apierrors.NewForbidden(resource, "192.0.2.1", errors.New(`User "system:secret" cannot`)), "the API server answered Forbidden"},
		{fmt.Errorf("claim: %w", apierrors.NewInternalError(errors.New("etcd at /var/lib/x"))), "the API server answered InternalError"},
		{&url.Error{Op: "Post", URL: "https://10.9.8.7:6443/?token=abc", Err: refused},
			"the API server cannot be reached; see the controller's log"},
		{&url.Error{Op: "Post", URL: "https://10.9.8.7:6443/", Err: context.DeadlineExceeded}, "the API server did not answer in time"},
		{apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, "web", long), "Service \"web\" is invalid"},
	} {
		got := syncProblem(c.err)
		if !strings.HasPrefix(got, c.want) || len(got) > maxSyncProblem || strings.ContainsAny(got, "\n\r") || len(got) > len(c.want) &&
			!apierrors.IsInvalid(c.err) {
			t.Errorf("%v\nis %q", c.err, got)
		}
	}
}
