package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a program under measurement, or one that a measurement needs.
type process struct {
	name  string
	log   string // file of its output
	begin time.Time
	cmd   *exec.Cmd
	ended chan struct{} // closed when err is set
	err   error
}

// spawn starts a program on a host, nil being that of the switch.
func spawn(h *host, dir, name, program string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), ended: make(chan struct{})}
	out, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p.cmd = exec.Command(program, args...)
	p.cmd.Dir = dir
	p.cmd.Env = append(os.Environ(), "HOME="+dir)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	start := func() error {
		p.begin = time.Now()
		return p.cmd.Start()
	}
	if h == nil {
		err = start()
	} else {
		err = h.on(start)
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// alive is why the process has ended, or nil.
func (p *process) alive() error {
	select {
	case <-p.ended:
		text, _ := os.ReadFile(p.log)
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		return fmt.Errorf("%s has ended: %v; its last words: %s", p.name, p.err, lines[len(lines)-1])
	default:
		return nil
	}
}

// stop ends the process as an administrator would.
func (p *process) stop() error {
	select {
	case <-p.ended:
		return nil
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
		return nil
	case <-time.After(30 * time.Second):
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.ended
		return fmt.Errorf("%s did not stop within 30 s", p.name)
	}
}

// cpu is the processor time that the process and the children it has waited
// for have used, in steps of 10 ms.
func (p *process) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	// proc_pid_stat(5): the fields after the name in parentheses; utime,
	// stime, cutime and cstime are fields 14 to 17 in ticks of 1/100 s.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 15 {
		return 0, errors.New("unexpected /proc/PID/stat")
	}
	var ticks int64
	for _, f := range fields[11:15] {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}

// settle waits until the process does next to nothing, at most limit: what it
// still has to do after a load would be in the way of the next measurement.
func (p *process) settle(limit time.Duration) error {
	const look = 500 * time.Millisecond
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); {
		before, err := p.cpu()
		if err != nil {
			return err
		}
		time.Sleep(look)
		after, err := p.cpu()
		if err != nil {
			return err
		}
		if after-before <= look/25 {
			return nil
		}
	}
	return fmt.Errorf("%s was still at work %s after a load", p.name, limit)
}

// memory is the proportional set size of the process in bytes: what it holds
// alone, and its share of what it holds together with others.
func (p *process) memory() (float64, error) {
	return p.kilobytes("smaps_rollup", "Pss:")
}

// peak is the largest resident set the process ever had, in bytes.
func (p *process) peak() (float64, error) {
	return p.kilobytes("status", "VmHWM:")
}

func (p *process) kilobytes(file, key string) (float64, error) {
	return kilobytesOf(p.cmd.Process.Pid, file, key)
}

func kilobytesOf(pid int, file, key string) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kb * 1024, err
		}
	}
	return 0, fmt.Errorf("no %s in /proc/PID/%s", key, file)
}
