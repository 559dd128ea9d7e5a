package org.apache.kafka.common.utils;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.function.Supplier;
import org.apache.kafka.common.errors.TimeoutException;

/**
 * Kafka's own clock, ahead or behind by as many milliseconds as a file says.
 *
 * It stands ahead of Kafka's class of this name on the class path. The file is named
 * by the property marshal.clock.file and looked at ten times a second, so that a clock
 * can be set while the broker runs.
 */
class SystemTime implements Time {
    private static final SystemTime INSTANCE = new SystemTime();
    private static final long LOOK_NS = 100_000_000L;

    private final Path file = Path.of(System.getProperty("marshal.clock.file"));
    private volatile long lookedNs = System.nanoTime() - LOOK_NS;
    private volatile long aheadMs = 0;

    public static SystemTime getSystemTime() {
        return INSTANCE;
    }

    private SystemTime() {}

    @Override
    public long milliseconds() {
        long nowNs = System.nanoTime();
        if (nowNs - lookedNs >= LOOK_NS) {
            lookedNs = nowNs;
            try {
                aheadMs = Long.parseLong(Files.readString(file).trim());
            } catch (Exception unreadable) {
                // Being written, or not there yet: what was read before stands.
            }
        }
        return System.currentTimeMillis() + aheadMs;
    }

    @Override
    public long nanoseconds() {
        return System.nanoTime();
    }

    @Override
    public void sleep(long ms) {
        Utils.sleep(ms);
    }

    @Override
    public void waitObject(Object on, Supplier<Boolean> condition, long deadlineMs)
            throws InterruptedException {
        synchronized (on) {
            while (!condition.get()) {
                long nowMs = milliseconds();
                if (nowMs >= deadlineMs) {
                    throw new TimeoutException("the condition did not come true in time");
                }
                on.wait(deadlineMs - nowMs);
            }
        }
    }
}
