package reflector

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// A rejection is logged at its first time, again after a success, and not at each retry.
func TestRejections(t *testing.T) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, "", errors.New("no role"))
	unauthorized, away := apierrors.NewUnauthorized("a wrong token"), errors.New("connection refused")
	logged := 0
	r := Rejections{Log: func(error) { logged++ }}
	for i, step := range []struct {
		err  error
		want int
	}{{forbidden, 1}, {forbidden, 1}, {away, 1}, {forbidden, 1}, {unauthorized, 2}, {nil, 2}, {unauthorized, 3}, {away, 3}} {
		r.Observe(step.err)
		if logged != step.want {
			t.Errorf("step %d, %v: %d lines, want %d", i, step.err, logged, step.want)
		}
	}
}
