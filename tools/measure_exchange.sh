#!/bin/sh
# Measures the exchange, training and the codec on hosts that this machine plays, for docs/performance.md.
#
#   tools/measure_exchange.sh FOLDER [exchange | slices | modes | prediction | hybrid | resnet50]...   default: exchange
#
# exchange: what the page's tables show, under 10 minutes on 2 quiet cores. slices: other numbers of slices, about 10
# minutes. modes: both ways to exchange, for `hvd8bit.modes`, 2 minutes. prediction: gradient lists at four rates and
# with 2 and 3 hosts, for `hvd8bit predict --profile`, about 25 minutes. hybrid: steps of the hybrid scheme at
# 100 Mbit/s, 3 minutes. resnet50: steps of ResNet-50 with hvd8bit's optimizer and with Horovod's own, 20 minutes; one
# link of them by resnet50-2-hosts-unlimited, resnet50-2-hosts-200mbit or resnet50-4-hosts-200mbit, and one optimizer by
# OPTIMIZERS=horovod in the environment. Needs root and iproute2 (see `hvd8bit bench netlab --help`), and a quiet
# machine: the hosts share its cores.
set -eu

folder=${1:?"usage: tools/measure_exchange.sh FOLDER [exchange | slices | modes | prediction | hybrid | resnet50]..."}
shift
[ $# -gt 0 ] || set -- exchange
mkdir -p "$folder"
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
export TF_CPP_MIN_LOG_LEVEL=3 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# hosts, rate or "unlimited", then what each worker runs
on_hosts() {
    hosts=$1 rate=$2
    shift 2
    limit=
    [ "$rate" = unlimited ] || limit="--rate $rate"
    # shellcheck disable=SC2086
    "$python" -m hvd8bit bench netlab -n "$hosts" $limit -- "$python" -m hvd8bit bench "$@"
}

exchange() {
    "$python" -m hvd8bit bench codec --rounds 11 --json "$folder/codec.json"
    on_hosts 4 unlimited exchange --elements 1k,16k,256k,1M,6M,25M --budget 10s --json "$folder/exchange-4-hosts-unlimited.json"
    on_hosts 4 1gbit exchange --elements 1M,6M,25M --compressions none,fp16,dynamic_tree --budget 20s \
        --json "$folder/exchange-4-hosts-1gbit.json"
    on_hosts 4 100mbit exchange --elements 25M --compressions none,fp16,dynamic_tree --rounds 3 \
        --json "$folder/exchange-4-hosts-100mbit.json"
    for hosts in 2 3; do
        on_hosts $hosts 1gbit exchange --elements 6M --compressions none,fp16,dynamic_tree --budget 10s \
            --json "$folder/exchange-$hosts-hosts-1gbit.json"
    done
    on_hosts 4 1gbit train --model MobileNetV2 --image-size 96 --batch-size 4 --budget 30s \
        --json "$folder/train-4-hosts-1gbit.json"
}

slices() {
    for hosts in 2 3 4; do
        for rate in unlimited 1gbit; do
            on_hosts $hosts $rate exchange --elements 1M,6M,25M --compressions none,dynamic_tree \
                --slices 1,2,3,4,6,8,12,16,24,32 --budget 25s --json "$folder/slices-$hosts-hosts-$rate.json"
        done
    done
    on_hosts 4 100mbit exchange --elements 6M --compressions none,dynamic_tree \
        --slices 1,2,4,8,16,24,32 --rounds 3 --json "$folder/slices-4-hosts-100mbit.json"
}

modes() {
    for hosts in 2 4; do
        for rate in unlimited 1gbit; do
            on_hosts $hosts $rate exchange --elements 1Ki,4Ki,16Ki,64Ki,256Ki,1Mi --compressions none,dynamic_tree \
                --exchanges scatter_reduce,allgather --sums-only --rounds 41 --budget 4s \
                --json "$folder/modes-$hosts-hosts-$rate.json"
        done
    done
}

prediction() {
    for rate in 1gbit 500mbit 200mbit 100mbit; do
        for model in ResNet50 alexnet; do
            on_hosts 4 $rate exchange --gradients-of $model --compressions none,dynamic_tree --rounds 5 --budget 30s \
                --sums-only --json "$folder/prediction-4-hosts-$rate-$model.json"
        done
    done
    for hosts in 2 3 4; do
        for rate in 1gbit 200mbit; do
            on_hosts $hosts $rate exchange --elements 1M,6M,25M --compressions none,dynamic_tree --rounds 7 \
                --budget 20s --json "$folder/profile-$hosts-hosts-$rate.json"
        done
    done
}

hybrid() {
    # Each of the two hosts has one of this machine's cores.
    TF_NUM_INTRAOP_THREADS=1 on_hosts 2 100mbit hybrid --sub-batches 1,4 --budget 90s \
        --json "$folder/hybrid-2-hosts-100mbit.json"
}

resnet50() {
    for link in 2-hosts-unlimited 2-hosts-200mbit 4-hosts-200mbit; do
        resnet50_on $link
    done
}

resnet50_on() {
    for optimizer in ${OPTIMIZERS:-hvd8bit horovod_group horovod}; do
        keras_2=1
        [ "$optimizer" != hvd8bit ] || keras_2=0
        # Two hosts have one of this machine's cores each; four share two.
        TF_NUM_INTRAOP_THREADS=1 TF_USE_LEGACY_KERAS=$keras_2 on_hosts "${1%%-*}" "${1##*-}" train --model ResNet50 \
            --image-size 64 --batch-size 8 --compressions none,eightbit --optimizer "$optimizer" --rounds 25 \
            --budget 25s --json "$folder/train-resnet50-$1-$optimizer.json"
    done
}

for part in "$@"; do
    case $part in
    exchange | slices | modes | prediction | hybrid | resnet50) "$part" ;;
    resnet50-2-hosts-unlimited | resnet50-2-hosts-200mbit | resnet50-4-hosts-200mbit) resnet50_on "${part#resnet50-}" ;;
    *)
        echo "tools/measure_exchange.sh: unknown part $part: exchange, slices, modes, prediction, hybrid or resnet50" >&2
        exit 2
        ;;
    esac
done
"$python" -m hvd8bit bench report "$folder"
