package ui

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
)

// Fifty pages of a user ask nodes once; another user, the same one with other groups, and a later time each ask again. An error is asked
// again, and there is a bound.
func TestKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kept{of: map[string]*keptAnswer{}}
		asked := 0
		ask := func(user string, groups ...string) (any, error) {
			return k.get(t.Context(), keyOf("/x", &rest.ImpersonationConfig{UserName: user, Groups: groups}, nil), time.Minute,
				func(context.Context) (any, error) {
					asked++
					n := asked
					time.Sleep(time.Second)
					if user == "broken" {
						return nil, errors.New("no")
					}
					return n, nil
				})
		}
		answers := make(chan any, 50)
		for range cap(answers) {
			go func() {
				v, err := ask("ann", "a")
				if err != nil {
					v = err
				}
				answers <- v
			}()
		}
		for range cap(answers) {
			if v := <-answers; v != 1 {
				t.Errorf("the answer is %v", v)
			}
		}
		for i, q := range []struct {
			user, group string
			want        int
			broken      bool
		}{{"ann", "a", 1, false}, {"ann", "b", 2, false}, {"bob", "a", 3, false}, {"broken", "", 4, true}, {"broken", "", 5, true}} {
			if v, err := ask(q.user, q.group); asked != q.want || (err != nil) != q.broken {
				t.Errorf("%d: %v, %v after %d questions, want %d", i, v, err, asked, q.want)
			}
		}
		time.Sleep(2 * time.Minute)
		if v, err := ask("ann", "a"); v != 6 || err != nil {
			t.Errorf("later: %v, %v", v, err)
		}
		for i := len(k.of); i < maxKept; i++ {
			k.of[fmt.Sprint("done", i)] = &keptAnswer{at: time.Now().Add(time.Duration(i)), keep: time.Minute}
		}
		n := len(k.of)
		if _, err := ask("late"); err != nil || n != maxKept || len(k.of) != maxKept {
			t.Errorf("with %d answers: %v", len(k.of), err)
		}
		for _, a := range k.of {
			a.at = time.Time{} // none of them is there yet
		}
		if _, err := ask("later"); !apierrors.IsTooManyRequests(err) {
			t.Errorf("with %d questions that are being answered: %v", len(k.of), err)
		}
		k.spill = true
		if v, err := ask("later"); v != asked || err != nil || len(k.of) != maxKept {
			t.Errorf("without a place, and without a refusal: %v, %v, %d are kept", v, err, len(k.of))
		}
	})
}

// Each answer counts for its own time, whatever the time of the other questions.
func TestKeptForItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kept{of: map[string]*keptAnswer{}}
		asked := map[string]int{}
		ask := func(key string, keep time.Duration) int {
			v, err := k.get(t.Context(), key, keep, func(context.Context) (any, error) {
				asked[key]++
				return asked[key], nil
			})
			if err != nil {
				t.Fatal(err)
			}
			return v.(int)
		}
		ask("long", time.Minute)
		ask("short", time.Second)
		time.Sleep(10 * time.Second)
		if n := ask("short", time.Second); n != 2 {
			t.Errorf("an answer for a second counts after ten: %d questions", n)
		}
		if n := ask("long", time.Minute); n != 1 {
			t.Errorf("an answer for a minute does not count after ten seconds: %d questions", n)
		}
	})
}
