package rotation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// Status is the state of a rotation for users.
type Status struct {
	// Step is empty where there was no rotation. Old and New are the authorities by their pki.Hash.
	Step Step   `json:"step,omitempty"`
	Old  string `json:"old,omitempty"`
	New  string `json:"new,omitempty"`
	// Waiting says who keeps the rotation from its next step, and why.
	Waiting []string `json:"waiting"`
}

// Blocked is the error of a step that others are not ready for.
type Blocked struct{ Waiting []string }

func (e *Blocked) Error() string {
	return "not everybody is ready; --force does not wait for them: " + strings.Join(e.Waiting, "; ")
}

// errProvided describes what to do with an authority that cannot be rotated.
var errProvided = errors.New("the authority in pki/ca.crt was provided by an installer, or its key is not in pki/ca.key: " +
	"it cannot be replaced here; stop the servers, put the new ca.crt and ca.key and the certificates that it signed into pki/, " +
	"start them, and have nodes join again with new tokens (docs/security.md)")

// current returns the state as it is stored.
func (r *Rotation) current(ctx context.Context) (*corev1.Secret, *state, error) {
	secret, err := r.o.Client.CoreV1().Secrets(metav1.NamespaceSystem).Get(ctx, SecretName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	s, _, err := open(secret, r.o.PKI.Bundle())
	if errors.Is(err, errSealed) {
		if err = r.left(secret); err == nil {
			return secret, nil, nil // of an earlier rotation, whose old authority is gone
		}
	}
	return secret, s, err
}

// Status returns the state of the rotation.
func (r *Rotation) Status(ctx context.Context) (Status, error) {
	secret, s, err := r.current(ctx)
	if err != nil || secret == nil {
		return Status{Waiting: []string{}}, err
	}
	out := Status{Step: Step(secret.Data[keyStep]), Old: string(secret.Data[keyOld]), New: string(secret.Data[keyNew]), Waiting: []string{}}
	var waiting []string
	if s != nil && s.Step != Done {
		waiting, err = r.waiting(ctx, s)
	} else {
		waiting, err = r.unfinished(ctx, string(secret.Data[keyKept]))
	}
	out.Waiting = append(out.Waiting, waiting...)
	return out, err
}

// unfinished returns the remaining steps after the end of a rotation that has kept an authority.
func (r *Rotation) unfinished(ctx context.Context, kept string) ([]string, error) {
	all, err := r.Reports(ctx)
	if err != nil {
		return nil, err
	}
	out := behind(all)
	if r.o.Members != nil && len(out) > 0 {
		out = append(r.absent(all), out...)
	}
	if pki.Hash(r.o.PKI.Authority()) != kept {
		return out, nil // an installer has replaced it since
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		switch report := all[name]; {
		case len(report.Trusts) == 0 || report.TrustsAll(kept):
		case strings.HasPrefix(name, nodePrefix):
			out = append(out, name+" does not trust the authority that was kept: it follows when its agent runs")
		default:
			out = append(out, name+" does not trust the authority that was kept: copy pki/ of another server there and restart it")
		}
	}
	return out, nil
}

// settled repeats a step that was decided on a state which another server has changed since.
func settled(step func() error) error {
	raced := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	return retry.OnError(retry.DefaultRetry, raced, step)
}

// Begin begins a rotation. One that goes on already goes on. With force, the step Trust does not wait
// for holders that have not reported.
func (r *Rotation) Begin(ctx context.Context, force bool) error {
	return settled(func() error { return r.begin(ctx, force) })
}

func (r *Rotation) begin(ctx context.Context, force bool) error {
	secret, s, err := r.current(ctx)
	if err != nil {
		return err
	}
	if s != nil && s.Step != Done {
		if s.Step == Trust && force {
			return r.write(ctx, secret, s, Sign, 0)
		}
		return nil
	}
	servers, err := r.o.Servers(ctx)
	if err != nil {
		return err
	}
	for name, report := range servers {
		if !report.TrustsAll(pki.Hash(r.o.PKI.Authority())) {
			return fmt.Errorf("%s has another authority than this server, or an earlier version: "+
				"servers of one cluster need the same pki/ca.crt and pki/ca.key, and one version", name)
		}
	}
	b, err := r.o.PKI.Successor()
	if errors.Is(err, pki.ErrProvided) {
		return errProvided
	}
	if err != nil {
		return err
	}
	next, err := (&state{Step: Trust, Bundle: *b}).seal(0)
	if err != nil {
		return err
	}
	secrets := r.o.Client.CoreV1().Secrets(metav1.NamespaceSystem)
	if secret == nil {
		_, err = secrets.Create(ctx, next, metav1.CreateOptions{})
		return err
	}
	next.ResourceVersion = secret.ResourceVersion
	_, err = secrets.Update(ctx, next, metav1.UpdateOptions{})
	return err
}

// errNone is the error of a step without a rotation.
var errNone = errors.New("no rotation of the authority is under way: 'fairlead certs rotate-ca' begins one")

// underWay is current for a rotation that is not done, errNone without one.
func (r *Rotation) underWay(ctx context.Context) (*corev1.Secret, *state, error) {
	secret, s, err := r.current(ctx)
	if err == nil && (s == nil || s.Step == Done) {
		err = errNone
	}
	return secret, s, err
}

// Finish removes the authority that does not sign. Without force it is an error while that is in use.
func (r *Rotation) Finish(ctx context.Context, force bool) error {
	return settled(func() error { return r.finish(ctx, force) })
}

func (r *Rotation) finish(ctx context.Context, force bool) error {
	secret, s, err := r.underWay(ctx)
	switch {
	case err != nil:
		return err
	case s.Step == Trust:
		return errors.New("the new authority does not sign yet: see 'fairlead certs rotate-ca --status', or --abort")
	}
	if !force {
		waiting, err := r.waiting(ctx, s)
		if err != nil {
			return err
		}
		if len(waiting) > 0 {
			return &Blocked{slices.Clip(waiting)}
		}
	}
	return r.write(ctx, secret, s, Done, s.signs())
}

// Abort goes back to the old authority: at once where the new one has signed nothing, else when Finish
// is called.
func (r *Rotation) Abort(ctx context.Context) error {
	return settled(func() error { return r.abort(ctx) })
}

func (r *Rotation) abort(ctx context.Context) error {
	secret, s, err := r.underWay(ctx)
	switch {
	case err != nil:
		return err
	case s.Step == Trust:
		return r.write(ctx, secret, s, Done, 0)
	case s.Step == Sign:
		return r.write(ctx, secret, s, Back, 0)
	}
	return nil
}
